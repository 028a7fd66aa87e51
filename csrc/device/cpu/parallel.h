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

// The elements of a part, at most. A batch of as many is one part, and stays on the calling thread:
// there eager torch does too, and beyond it a process that forked after a threaded call hangs, as
// OpenMP's threads are lost. Two threads would take as long for 8192 log-probs, and 20 % less for
// 20480 and for 32768; smaller parts of large batches cost, those of 8192 15 % over 131072
// log-probs (k3 to a mean, fp32 and bf16, two cores with AVX-512, interleaved).
inline constexpr int64_t kElementsOfPart = 32768;

// Equal parts: two of 20480 log-probs, say, where one of 32768 would leave a thread 8192.
inline int64_t parts_of(int64_t elements) {
  return std::max<int64_t>(1, (elements + kElementsOfPart - 1) / kElementsOfPart);
}

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

// Runs body(i) for every i < n. The n bodies read `elements` together, and about as many each.
inline void for_each(int64_t n, int64_t elements, const Threads& threads,
                     const std::function<void(int64_t)>& body) {
  const int64_t parts = std::min(n, parts_of(elements));
  for_each_part(parts, threads, [&](int64_t part) {
    for (int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) body(i);
  });
}

}  // namespace klfast::cpu
