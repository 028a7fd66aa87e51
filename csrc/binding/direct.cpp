#include "binding/direct.h"

#include <array>
#include <exception>
#include <utility>

#include "binding/cpu.h"
#include "binding/dlpack.h"
#include "binding/logits_ops.h"
#include "binding/penalty_ops.h"

namespace klfast::rim {

const dlpack::Exchange* exchange = nullptr;

// A Python error that has been set.
struct PythonError {};

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

// A tensor of Python, as rim's templates take one.
class PyTensor {
 public:
  explicit PyTensor(Object object) : object_(std::move(object)) {
    if (exchange->from_python(object_.get(), &tensor_) != 0) throw PythonError();
  }
  const dlpack::Tensor& raw() const { return tensor_; }
  PyObject* release() { return object_.release(); }
  int64_t dim() const { return tensor_.ndim; }
  int64_t size(int64_t i) const { return tensor_.shape[i]; }
  int64_t stride(int64_t i) const { return tensor_.strides[i]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int32_t i = 0; i < tensor_.ndim; ++i) n *= tensor_.shape[i];
    return n;
  }
  struct Sizes {
    const int64_t* first;
    const int64_t* last;
    const int64_t* begin() const { return first; }
    const int64_t* end() const { return last; }
  };
  Sizes sizes() const { return {tensor_.shape, tensor_.shape + tensor_.ndim}; }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int32_t i = tensor_.ndim; i-- > 0;) {
      if (tensor_.shape[i] == 0) return true;
      if (tensor_.shape[i] != 1 && tensor_.strides[i] != expected) return false;
      expected *= tensor_.shape[i];
    }
    return true;
  }
  const void* const_data_ptr() const { return mutable_data_ptr(); }
  void* mutable_data_ptr() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }
  ScalarType scalar_type() const;

 private:
  Object object_;
  dlpack::Tensor tensor_;
};

constexpr struct {
  ScalarType type;
  dlpack::DataType raw;
  DType own;
} kTypes[] = {
    {ScalarType::Double, {dlpack::kFloat, 64, 1}, DType::kFloat64},
    {ScalarType::Float, {dlpack::kFloat, 32, 1}, DType::kFloat32},
    {ScalarType::BFloat16, {dlpack::kBfloat, 16, 1}, DType::kBFloat16},
    {ScalarType::Half, {dlpack::kFloat, 16, 1}, DType::kFloat16},
    {ScalarType::Bool, {dlpack::kBool, 8, 1}, DType::kBool},
    {ScalarType::Byte, {dlpack::kUInt, 8, 1}, DType::kUInt8},
    {ScalarType::Char, {dlpack::kInt, 8, 1}, DType::kInt8},
    {ScalarType::Short, {dlpack::kInt, 16, 1}, DType::kInt16},
    {ScalarType::Int, {dlpack::kInt, 32, 1}, DType::kInt32},
    {ScalarType::Long, {dlpack::kInt, 64, 1}, DType::kInt64},
};

bool same(dlpack::DataType a, dlpack::DataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

ScalarType PyTensor::scalar_type() const {
  for (const auto& type : kTypes) {
    if (same(type.raw, tensor_.dtype)) return type.type;
  }
  KLFAST_CHECK(false, "a tensor has a dtype that the kernels do not read");
}

DType dtype_of(const PyTensor& tensor, const char* argument) {
  for (const auto& type : kTypes) {
    if (same(type.raw, tensor.raw().dtype)) return type.own;
  }
  KLFAST_CHECK(false, argument, " has a dtype that the kernels do not read");
}

Device device_of(const PyTensor& tensor) {
  const dlpack::Device& device = tensor.raw().device;
  if (device.type == dlpack::kCpu) return {aoti_torch_device_type_cpu(), -1};
  return {aoti_torch_device_type_cuda(), device.index};
}

template <>
PyTensor empty<PyTensor>(const std::vector<int64_t>& sizes, ScalarType dtype,
                         const Device& device) {
  dlpack::Tensor prototype = {};
  prototype.ndim = static_cast<int32_t>(sizes.size());
  prototype.shape = const_cast<int64_t*>(sizes.data());
  for (const auto& type : kTypes) {
    if (type.type == dtype) prototype.dtype = type.raw;
  }
  const bool is_cpu = device.type == aoti_torch_device_type_cpu();
  prototype.device = {is_cpu ? dlpack::kCpu : dlpack::kCuda, is_cpu ? 0 : device.index};
  dlpack::ManagedTensor* managed = nullptr;
  void* object = nullptr;
  if (exchange->allocate(&prototype, &managed, nullptr, nullptr) != 0 ||
      exchange->managed_to_python(managed, &object) != 0) {
    throw PythonError();
  }
  return PyTensor(Object(static_cast<PyObject*>(object)));
}

// Arguments of Python to those of an op.

template <typename T>
struct From;

template <>
struct From<PyTensor> {
  static PyTensor of(PyObject* object) {
    Py_INCREF(object);
    return PyTensor(Object(object));
  }
};

template <>
struct From<std::optional<PyTensor>> {
  static std::optional<PyTensor> of(PyObject* object) {
    if (object == Py_None) return std::nullopt;
    return From<PyTensor>::of(object);
  }
};

template <>
struct From<bool> {
  static bool of(PyObject* object) { return object == Py_True; }
};

template <>
struct From<int64_t> {
  static int64_t of(PyObject* object) {
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return value;
  }
};

template <>
struct From<double> {
  static double of(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return value;
  }
};

template <typename T>
struct From<std::vector<T>> {
  static std::vector<T> of(PyObject* object) {
    if (!PyTuple_Check(object)) {
      PyErr_SetString(PyExc_TypeError, "choices and numbers must be tuples");
      throw PythonError();
    }
    std::vector<T> values(PyTuple_GET_SIZE(object));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = From<T>::of(PyTuple_GET_ITEM(object, i));
    }
    return values;
  }
};

template <typename... T>
PyObject* to_python(std::tuple<T...>&& results) {
  return std::apply(
      [](T&... result) {
        Object tuple(PyTuple_New(sizeof...(T)));
        Py_ssize_t i = 0;
        (PyTuple_SET_ITEM(tuple.get(), i++, result.release()), ...);
        return tuple.release();
      },
      results);
}

inline PyObject* to_python(PyTensor&& result) { return result.release(); }

// A function of Python over an op. Errors of the op are RuntimeErrors, as the dispatcher's are.
template <auto op, typename Result, typename... Arguments, size_t... i>
PyObject* call(Result (*)(Arguments...), PyObject* const* arguments, std::index_sequence<i...>) {
  if constexpr (std::is_void_v<Result>) {
    op(From<Arguments>::of(arguments[i])...);
    Py_RETURN_NONE;
  } else {
    return to_python(op(From<Arguments>::of(arguments[i])...));
  }
}

template <typename Result, typename... Arguments>
constexpr size_t arity(Result (*)(Arguments...)) {
  return sizeof...(Arguments);
}

template <auto op>
PyObject* function(PyObject*, PyObject* const* arguments, Py_ssize_t n) {
  constexpr size_t expected = arity(op);
  if (n != static_cast<Py_ssize_t>(expected)) {
    PyErr_Format(PyExc_TypeError, "klfast: expected %zu arguments, got %zd", expected, n);
    return nullptr;
  }
  try {
    return call<op>(op, arguments, std::make_index_sequence<expected>());
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* tensor_type = nullptr;
PyObject* parameter_type = nullptr;
PyObject* is_neg = nullptr;
// Functions of torch that say a number or a bool: 0 where nothing stands between Python and ops.
std::array<PyObject*, 3> states = {};

bool is_true(PyObject* object) {
  const Object result(object);
  const int value = PyObject_IsTrue(result.get());
  if (value < 0) throw PythonError();
  return value != 0;
}

// Whether memory holds the values that a tensor has: no subclass, no view that negates, nothing
// that only stands for a tensor.
bool is_plain(PyObject* object, dlpack::Device* device) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != tensor_type && type != parameter_type) return false;
  dlpack::Tensor tensor;
  if (exchange->from_python(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  int64_t numel = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) numel *= tensor.shape[i];
  if (tensor.data == nullptr && numel > 0) return false;
  if (device->type == 0) *device = tensor.device;
  if (tensor.device.type != device->type || tensor.device.index != device->index) {
    return false;
  }
  if (tensor.device.type != dlpack::kCpu && tensor.device.type != dlpack::kCuda) return false;
  return !is_true(PyObject_Vectorcall(is_neg, &object, 1, nullptr));
}

// are_plain(*tensors or None): 0, or the type of their device as DLPack numbers it (1 CPU, 2 CUDA).
PyObject* are_plain(PyObject*, PyObject* const* arguments, Py_ssize_t n) {
  try {
    for (PyObject* const state : states) {
      if (is_true(PyObject_CallNoArgs(state))) return PyLong_FromLong(0);
    }
    dlpack::Device device = {};
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (arguments[i] != Py_None && !is_plain(arguments[i], &device)) return PyLong_FromLong(0);
    }
    return PyLong_FromLong(device.type);
  } catch (const PythonError&) {
    return nullptr;
  }
}

template <auto op>
constexpr PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&function<op>)),
          METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    {"are_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&are_plain)),
     METH_FASTCALL, nullptr},
    method<&kl_penalty_fwd<Cpu, PyTensor>>("kl_penalty_fwd"),
    method<&kl_penalty_bwd<Cpu, PyTensor>>("kl_penalty_bwd"),
    method<&token_logprobs_fwd<CpuLogits, PyTensor>>("token_logprobs_fwd"),
    method<&token_logprobs_bwd<CpuLogits, PyTensor>>("token_logprobs_bwd"),
    method<&token_logprobs_bwd_<CpuLogits, PyTensor>>("token_logprobs_bwd_"),
    method<&kl_divergence_fwd<CpuLogits, PyTensor>>("kl_divergence_fwd"),
    method<&kl_divergence_bwd<CpuLogits, PyTensor>>("kl_divergence_bwd"),
    method<&scale_<Cpu, PyTensor>>("scale_"),
    {},
};

PyObject* attribute(PyObject* of, std::initializer_list<const char*> names) {
  Py_INCREF(of);
  Object object(of);
  for (const char* name : names) object = Object(PyObject_GetAttrString(object.get(), name));
  return object.release();
}

}  // namespace klfast::rim

namespace klfast::direct {

bool add_to(PyObject* module) {
  using namespace rim;
  try {
    const Object torch(PyImport_ImportModule("torch"));
    tensor_type = attribute(torch.get(), {"Tensor"});
    parameter_type = attribute(torch.get(), {"nn", "Parameter"});
    is_neg = attribute(tensor_type, {"is_neg"});
    states = {attribute(torch.get(), {"_C", "_len_torch_function_stack"}),
              attribute(torch.get(), {"_C", "_len_torch_dispatch_stack"}),
              attribute(torch.get(), {"_C", "_are_functorch_transforms_active"})};
    const Object table(attribute(tensor_type, {"__dlpack_c_exchange_api__"}));
    exchange = static_cast<const dlpack::Exchange*>(
        PyCapsule_GetPointer(table.get(), "dlpack_exchange_api"));
    if (exchange == nullptr) throw PythonError();
    return PyModule_AddFunctions(module, methods) == 0;
  } catch (const PythonError&) {
    return false;
  }
}

}  // namespace klfast::direct
