// Counters of arrived blocks. Each device has a static array of them that starts as zeros, so a
// launch needs neither an allocation nor a memset.

#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "device/cuda/device.h"
#include "device/cuda/host.h"

namespace klfast::cuda {
namespace {

constexpr int kCounters = 1 << 14;
__device__ unsigned counters[kCounters];

struct Counters {
  unsigned* first = nullptr;
  int used = 0;
  std::unordered_map<unsigned long long, int> of_stream;  // by its id, which is never used again
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) cudaGetLastError();  // not torch's
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

unsigned* arrivals_of_stream(int device, void* stream) {
  // This handle names another stream in every thread.
  if (stream == static_cast<void*>(cudaStreamPerThread)) return nullptr;
  static std::mutex mutex;
  static std::unordered_map<int, Counters> of_device;
  const bool capturing = is_capturing(static_cast<cudaStream_t>(stream));
  unsigned long long id = 0;
  // A handle can name a new stream while work of a destroyed stream is still pending. The id
  // cannot.
  if (!capturing && cudaStreamGetId(static_cast<cudaStream_t>(stream), &id) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  Counters& pool = of_device[device];
  if (pool.first == nullptr) {
    void* address = nullptr;
    if (cudaGetSymbolAddress(&address, counters) != cudaSuccess) {
      cudaGetLastError();  // clears the error: the caller zeroes its own counter
      return nullptr;
    }
    pool.first = static_cast<unsigned*>(address);
  }
  if (!capturing) {
    const auto known = pool.of_stream.find(id);
    if (known != pool.of_stream.end()) return pool.first + known->second;
  }
  if (pool.used == kCounters) return nullptr;
  const int fresh = pool.used++;
  if (!capturing) pool.of_stream[id] = fresh;
  return pool.first + fresh;
}

void zero(unsigned* arrivals, void* stream) {
  const cudaError_t error =
      cudaMemsetAsync(arrivals, 0, sizeof(unsigned), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

}  // namespace klfast::cuda
