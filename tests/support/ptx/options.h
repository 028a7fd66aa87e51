// Settings from the environment, read once:
//
//   KLFAST_PTX_ARCH        whose PTX: 80, 90 (the default), 100, 120. Without it, the tests of
//                          `native-emulated` run on the emulator of the source.
//   KLFAST_PTX_CHIP        whose limits a launch has (chips.cpp): h200, h100, b200, rtx5090, a100,
//                          l4, mig, or those of the emulator. The default is h200.
//   KLFAST_PTX_SCHEDULE    lowest: the lanes with the lowest instruction go first (the default);
//                          random: any go, and meet again at .sync instructions alone
//   KLFAST_PTX_SEED        of the random order of warps, clusters and lanes; 1 by default
//   KLFAST_PTX_RACES       shared: races in shared memory are faults (the default); all: those in
//                          global memory too, at several times the cost; none
//   KLFAST_PTX_PERTURB     0 by default: by how many units in the last place ex2.approx and
//                          lg2.approx may be off, at random; rcp.approx is then off by one
//   KLFAST_PTX_COVERAGE    beginning of the name of a file, which says the instructions that ran
//   KLFAST_PTX_FOLDER      where the module and its PTX are; build/ptx/sm90 by default

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
