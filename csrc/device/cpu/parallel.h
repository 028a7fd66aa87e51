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

// The most elements of a part. A batch of this size or less is one part and stays on the calling
// thread, as in eager torch. With a larger batch, a process that was forked after a threaded call
// hangs, because OpenMP's threads are lost in a fork.
//
// Two threads would take as long as one for 8,192 log-probs, and 20 % less for 20,480 and for
// 32,768. Smaller parts make large batches slower. Parts of 8,192 take 15 % longer for 131,072
// log-probs. (These are times of k3 with a mean, in fp32 and bf16, interleaved, on two cores with
// AVX-512.)
inline constexpr int64_t kElementsOfPart = 32768;

// The number of parts, which have equal sizes. 40,960 log-probs make two parts of 20,480. A part of
// 32,768 would leave only 8,192 to another thread.
inline int64_t parts_of(int64_t elements) {
  return std::max<int64_t>(1, (elements + kElementsOfPart - 1) / kElementsOfPart);
}

// Runs body(part) for every part < parts. A free thread takes the next part, because some parts
// take longer than others.
inline void for_each_part(int64_t parts, const Threads& threads,
                          const std::function<void(int64_t)>& body) {
  instruction_set();  // throws here, because an error in a parallel region loses its message
  if (parts <= 1 || threads.count <= 1) {
    for (int64_t part = 0; part < parts; ++part) body(part);
    return;
  }
  std::atomic<int64_t> next{0};
  threads.run(threads.count, [&](int64_t, int64_t) {
    for (int64_t part = next++; part < parts; part = next++) body(part);
  });
}

// Runs body(i) for every i < n. The n bodies read `elements` elements in total, each about as many.
inline void for_each(int64_t n, int64_t elements, const Threads& threads,
                     const std::function<void(int64_t)>& body) {
  const int64_t parts = std::min(n, parts_of(elements));
  for_each_part(parts, threads, [&](int64_t part) {
    for (int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) body(i);
  });
}

}  // namespace klfast::cpu
