// The interpreter for programs in other languages: C functions over PTX of their own. An error is a
// text, which stays until the next call of the thread.

#include "allocations.h"
#include "options.h"
#include "program.h"
#include "text.h"
#include "warp.h"

namespace {

thread_local std::string error;

// Parameters lie one after the other in the kernel's own memory of parameters.
std::string placed(const ptx::Kernel& kernel, const void* const* arguments) {
  std::string bytes(kernel.parameter_bytes, '\0');
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const ptx::Parameter& parameter = kernel.parameters[i];
    bytes.replace(parameter.offset, parameter.size, static_cast<const char*>(arguments[i]),
                  parameter.size);
  }
  return bytes;
}

}  // namespace

extern "C" {

const char* klfast_ptx_error() { return error.c_str(); }

// A kernel of a text; null with an error. `path` is the name that reports give the text.
void* klfast_ptx_load(const char* path, const char* text, const char* name) {
  try {
    return ptx::load_text(path, text, name);
  } catch (const std::exception& failure) {
    error = failure.what();
    return nullptr;
  }
}

int klfast_ptx_parameters(void* kernel) {
  return static_cast<int>(static_cast<ptx::Kernel*>(kernel)->parameters.size());
}
int klfast_ptx_parameter_size(void* kernel, int i) {
  return static_cast<int>(
      static_cast<ptx::Kernel*>(kernel)->parameters[static_cast<size_t>(i)].size);
}

// Kernels may touch these allocations and the variables of their modules.
void klfast_ptx_add_allocation(const void* address, uint64_t size) {
  ptx::add_allocation(address, size);
}
void klfast_ptx_remove_allocation(const void* address) { ptx::remove_allocation(address); }

// races: 0 none, 1 shared, 2 all.
void klfast_ptx_set_options(int races, int is_random, uint64_t seed, int perturb) {
  ptx::Options& options = ptx::options();
  options.checks_shared = races != 0;
  options.checks_global = races == 2;
  options.is_random = is_random != 0;
  options.seed = seed;
  options.perturb = perturb;
}

// Each argument is the address of a parameter's value. 0, or 1 with an error.
int klfast_ptx_launch(void* handle, uint32_t blocks, uint32_t threads, uint32_t of_cluster,
                      uint64_t dynamic_shared, const void* const* arguments) {
  try {
    ptx::Kernel& kernel = *static_cast<ptx::Kernel*>(handle);
    const std::string parameters = placed(kernel, arguments);
    ptx::run(kernel, {blocks, threads, of_cluster, dynamic_shared},
             reinterpret_cast<const ptx::u8*>(parameters.data()));
    return 0;
  } catch (const std::exception& failure) {
    error = failure.what();
    return 1;
  }
}

// The kernels of a folder, and the instructions of each with their lines of source, as text: for
// tables of what has run.
const char* klfast_ptx_describe_folder(const char* folder) {
  static std::string text;
  text.clear();
  try {
    ptx::load_folder(folder);
    for (const std::string& name : ptx::kernel_names()) {
      const ptx::Kernel& kernel = *ptx::find_kernel(name);
      text += "kernel " + name + "\n";
      for (const ptx::Instruction& in : kernel.code) {
        text += ptx::source_line(kernel, in) + "\t" + kernel.texts[in.text] + "\n";
      }
    }
    return text.c_str();
  } catch (const std::exception& failure) {
    error = failure.what();
    return nullptr;
  }
}
}
