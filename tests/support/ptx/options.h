// Settings from the environment. They are read once.
//
//   KLFAST_PTX_ARCH        The architecture: 80, 90 (the default), 100, 120. Without it, the tests
//                          of `native-emulated` run on the emulator of the source.
//   KLFAST_PTX_CHIP        The chip whose limits apply (chips.cpp): h200 (the default), h100, b200,
//                          rtx5090, a100, l4, mig, or a chip of the emulator.
//   KLFAST_PTX_SCHEDULE    "lowest" runs the lanes with the lowest instruction first (the default).
//                          "random" runs any lanes, which meet again only at .sync instructions.
//   KLFAST_PTX_SEED        The seed of the random order of warps, clusters and lanes. Default: 1.
//   KLFAST_PTX_RACES       "shared" checks shared memory for races (the default). "all" checks
//                          global memory too, at several times the cost. "none" checks nothing.
//   KLFAST_PTX_PERTURB     The random error of ex2.approx and lg2.approx, in units in the last
//                          place. If it is not 0 (the default), rcp.approx is off by one unit.
//   KLFAST_PTX_COVERAGE    The beginning of a file's name. The file lists the instructions that
//                          ran.
//   KLFAST_PTX_FOLDER      The folder of the module and its PTX. Default: build/ptx/sm90.

#pragma once

#include <string>

#include "types.h"

namespace ptx {

struct Options {
  std::string chip = "h200";
  bool is_random = false;
  u64 seed = 1;
  bool checks_shared = true, checks_global = false;
  int perturb = 0;
  int arch = 90;
  std::string coverage;
};

// They may be changed between launches, as the tests of the interpreter do.
Options& options();

}  // namespace ptx
