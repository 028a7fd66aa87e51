// The part of DLPack 1.3's C interface that the direct road uses (dmlc.github.io/dlpack): torch's
// own header may not be included beside the stable ABI.

#pragma once

#include <cstdint>

namespace klfast::dlpack {

enum : int32_t { kCpu = 1, kCuda = 2 };
enum : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Device {
  int32_t type;
  int32_t index;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// The functions that torch.Tensor offers in the capsule __dlpack_c_exchange_api__. Only from_python
// is called, which returns 0 or has set a Python error. (A tensor that they make has foreign
// memory: it cannot be resized, and record_stream does not know it.)
struct Exchange {
  struct {
    uint32_t major;
    uint32_t minor;
  } version;
  const Exchange* previous;
  void (*allocate)();
  void (*managed_from_python)();
  void (*managed_to_python)();
  int (*from_python)(void* object, Tensor* out);
  void (*current_stream)();
};

}  // namespace klfast::dlpack
