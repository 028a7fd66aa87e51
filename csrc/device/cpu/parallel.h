// Loops that run on several threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace klfast::cpu {

// A number of threads, and a function that calls body(begin, end) for parts of [0, n) on them.
struct Threads {
  int count;
  void (*run)(int64_t n, const std::function<void(int64_t, int64_t)>& body);
};

// The name of the instruction set that the CPU kernels use. Throws std::runtime_error if KLFAST_CPU
// asks for one that this processor does not have.
const char* instruction_set();

inline constexpr int64_t kElementsPerTask = 32768;  // below this, threads cost more than they bring

// Runs body(i) for every i < n. A free thread takes the next chunk of indices, as some bodies run
// longer than others. A chunk holds about kElementsPerTask of the `elements` that all n bodies
// read.
inline void for_each(int64_t n, int64_t elements, const Threads& threads,
                     const std::function<void(int64_t)>& body) {
  instruction_set();  // throws here: an error inside a parallel region loses its message
  if (elements <= kElementsPerTask || threads.count <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  const int64_t chunk = std::max<int64_t>(1, kElementsPerTask * n / elements);
  std::atomic<int64_t> next{0};
  threads.run(threads.count, [&](int64_t, int64_t) {
    while (true) {
      const int64_t begin = next.fetch_add(chunk);
      if (begin >= n) return;
      for (int64_t i = begin; i < std::min(n, begin + chunk); ++i) body(i);
    }
  });
}

}  // namespace klfast::cpu
