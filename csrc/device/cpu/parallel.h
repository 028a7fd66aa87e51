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

// Runs body(part) for every part < parts. A free thread takes the next part, as some take longer
// than others.
inline void for_each_part(int64_t parts, const Threads& threads,
                          const std::function<void(int64_t)>& body) {
  instruction_set();  // throws here: an error inside a parallel region loses its message
  if (parts <= 1 || threads.count <= 1) {
    for (int64_t part = 0; part < parts; ++part) body(part);
    return;
  }
  std::atomic<int64_t> next{0};
  threads.run(threads.count, [&](int64_t, int64_t) {
    for (int64_t part = next++; part < parts; part = next++) body(part);
  });
}

// Runs body(i) for every i < n. The n bodies read `elements` together and about as many each; a
// part reads about kElementsPerTask.
inline void for_each(int64_t n, int64_t elements, const Threads& threads,
                     const std::function<void(int64_t)>& body) {
  const bool is_small = elements <= kElementsPerTask;
  const int64_t size = is_small ? n : std::max<int64_t>(1, kElementsPerTask * n / elements);
  for_each_part(n == 0 ? 0 : (n + size - 1) / size, threads, [&](int64_t part) {
    for (int64_t i = part * size; i < std::min(n, (part + 1) * size); ++i) body(i);
  });
}

}  // namespace klfast::cpu
