// Tensors of Python as the ops' templates take them: read through the DLPack exchange table of
// torch.Tensor (torch 2.10 and later), without torch's dispatcher, and made by torch.empty.

#pragma once

#include <Python.h>

#include <initializer_list>
#include <utility>

#include "binding/dlpack.h"
#include "binding/penalty_ops.h"

namespace klfast::binding {

// A Python error that has been set.
struct PythonError {};

// A tensor, or a mode of torch, that only the dispatcher serves.
struct NotPlain {};

// An owned reference.
class Object {
 public:
  explicit Object(PyObject* object) : object_(object) {
    if (object == nullptr) throw PythonError();
  }
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object(const Object& other) : object_(other.object_) { Py_XINCREF(object_); }
  Object& operator=(Object other) {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// The exchange table accepts tensors whose memory does not hold their values. Refused here are
// subclasses, fake tensors among them, by their type; zero tensors, functional tensors and emptied
// storages, as they have no memory; negated views by their bit; other devices than CPU and CUDA;
// dtypes of less than 8 bits, which the table calls 8-bit integers.
class PyTensor {
 public:
  // None, for an output that is not wanted.
  PyTensor();
  // Throws NotPlain.
  explicit PyTensor(PyObject* borrowed);
  // A new tensor.
  PyTensor(const std::vector<int64_t>& sizes, ScalarType dtype, const Device& device);

  PyObject* release() { return object_.release(); }
  const dlpack::Tensor& raw() const { return tensor_; }
  int64_t dim() const { return tensor_.ndim; }
  int64_t size(int64_t i) const { return tensor_.shape[i]; }
  int64_t stride(int64_t i) const { return tensor_.strides[i]; }
  int64_t numel() const;
  bool is_contiguous() const;
  ScalarType scalar_type() const;
  const void* const_data_ptr() const { return mutable_data_ptr(); }
  void* mutable_data_ptr() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }

  struct Sizes {
    const int64_t* first;
    const int64_t* last;
    const int64_t* begin() const { return first; }
    const int64_t* end() const { return last; }
  };
  Sizes sizes() const { return {tensor_.shape, tensor_.shape + tensor_.ndim}; }

 private:
  Object object_;
  dlpack::Tensor tensor_ = {};
};

DType dtype_of(const PyTensor& tensor, const char* argument);
Device device_of(const PyTensor& tensor);

template <>
inline PyTensor empty<PyTensor>(const std::vector<int64_t>& sizes, ScalarType dtype,
                                const Device& device) {
  return PyTensor(sizes, dtype, device);
}

template <>
inline PyTensor unwanted<PyTensor>(ScalarType, const Device&) {
  return PyTensor();
}

// Throws NotPlain under a mode that sees the calls of ops: of torch functions, dispatch,
// torch.func, torch.jit.trace or this thread's profiler.
void require_plain_mode();

// Looks up the attributes of torch that are needed here; throws PythonError if one is missing.
void find_torch();

}  // namespace klfast::binding
