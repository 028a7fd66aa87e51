// A parsed module: kernels, made of instructions over registers. A register has a value for each
// lane of a warp.

#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "types.h"

namespace ptx {

struct Warp;
struct Instruction;
using Run = void (*)(Warp& warp, const Instruction& in, u32 lanes);

// The action of the schedule for an instruction, beside or instead of its `run`.
enum class Kind : u8 {
  kPlain,
  kBranch,
  kCall,
  kReturn,
  kExit,
  kBlockBarrier,
  kWarpBarrier,
  kExchange,  // of lanes that a mask names: shfl, redux
  kVote,
  kClusterArrive,
  kClusterWait,
  kCopyWait  // for the phase of a barrier in shared memory
};

enum class Space : u8 { kGeneric, kGlobal, kShared, kLocal, kParameter };

// The lanes of a result that count as written.
enum class Defined : u8 {
  kByAll,     // operands
  kByAny,     // operand: words that are put together of parts
  kBySelect,  // the predicate, and the operand that it chooses
  kByAnd,     // or one operand is false
  kByOr,      // or one operand is true
  kByItself   // `run` says it
};

// A register or a constant: the place of its values in a warp. The id names the lanes in which it
// has been written. An operand of id 0 counts as written in all lanes.
struct Operand {
  u32 offset = 0;
  u32 id = 0;
  u8 width = 0;  // bytes; 0 of a predicate
};

struct Address {
  Operand base;
  bool has_base = false;
  i64 offset = 0;
};

enum class Type : u8 { kU8, kS8, kU16, kS16, kU32, kS32, kU64, kS64, kF16, kBF16, kF32, kF64 };

struct Conversion {
  Type to = Type::kU32, from = Type::kU32;
  char rounding = 'n';  // of rn, rz, rm, rp
  bool to_integral = false, flushes = false, saturates = false;
};

// The line of an instruction in the PTX and, with -lineinfo, in the source.
struct Source {
  u32 line = 0;
  u32 file = 0, file_line = 0;
  u32 inlined_file = 0, inlined_line = 0;
};

constexpr int kMostElements = 8;  // of a vector

struct Instruction {
  Run run = nullptr;
  Kind kind = Kind::kPlain;
  Defined defined = Defined::kByAll;
  Space space = Space::kGeneric;
  u8 count = 1;   // of elements
  u8 size = 0;    // bytes of an element in memory
  u8 option = 0;  // of instructions that share a `run`
  bool is_signed = false;
  bool is_read_only = false;  // ld.global.nc
  bool has_predicate = false;
  bool negated = false;     // the predicate
  bool has_fences = false;  // an atomic that is a fence too
  bool has_length = false;  // a copy whose length is an operand
  bool negates_vote = false;
  Operand predicate;
  Operand members;  // the lanes that meet
  Operand d, a, b, c, e;
  Operand elements[kMostElements];
  Address address, from, barrier;  // the last two: of a copy
  Conversion conversion;
  u32 target = 0;  // of a branch or call
  u32 slot = 0;    // of the function that is called or returns: where its way back is kept
  i64 number = 0;
  Source source;
  u32 text = 0;
};

enum class Special : u8 {
  kThread,
  kThreads,
  kBlock,
  kBlocks,
  kLane,
  kWarp,
  kRank,
  kRanks,
  kZero,
  kOne,
  kLaneMaskLower,
  kLaneMaskLowerEqual
};

struct Parameter {
  std::string name;
  u32 offset, size;
};

struct Constant {
  u32 offset;
  std::string bytes;  // of all lanes
};

struct Module;

struct Kernel {
  std::string name;
  const Module* module = nullptr;
  std::vector<Instruction> code;
  std::vector<std::string> texts;
  std::vector<u8> has_run;  // of each instruction
  std::vector<Parameter> parameters;
  u32 parameter_bytes = 0;
  u32 most_threads = 0;  // of .maxntid; 0 if there is no limit
  std::vector<Constant> constants;
  std::vector<std::pair<u32, Special>> specials;  // offset, which
  std::vector<std::string> register_names;        // by id
  u32 register_bytes = 0;
  u32 local_bytes = 0;
  u32 argument_bytes = 0;  // of the functions that it calls
  u32 functions = 0;       // that it calls
  u32 static_shared = 0;
  u32 dynamic_shared = 0;  // where dynamic shared memory begins
};

struct Symbol {
  bool is_shared = false;
  bool is_dynamic = false;  // an array of shared memory without a size
  u64 size = 0, align = 1;
  u8* memory = nullptr;
};

struct Module {
  std::string path, text;
  std::unordered_map<std::string, size_t> functions;  // by name: where their text begins
  std::vector<std::string> entries;
  std::unordered_map<std::string, Symbol> symbols;
  std::unordered_map<u32, std::string> files;
};

// Loads every .ptx of a folder.
void load_folder(const std::string& folder);
// A kernel by its mangled name, parsed when it is first asked for; null if there is none.
Kernel* find_kernel(const std::string& name);
// A kernel of a text of its own.
Kernel* load_text(const std::string& path, const std::string& text, const std::string& name);
// The memory of a variable of the device; null if there is none.
void* find_variable(const std::string& name);
std::vector<std::string> kernel_names();
std::vector<const Kernel*> parsed_kernels();

// An instruction, with its line of source and of PTX.
std::string describe(const Kernel& kernel, const Instruction& in);
// Its line of source, as "csrc/device/cuda/load.h:146".
std::string source_line(const Kernel& kernel, const Instruction& in);

}  // namespace ptx
