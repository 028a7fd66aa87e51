#include "binding/py_tensor.h"

#include <array>
#include <map>

namespace klfast::binding {
namespace {

const dlpack::Exchange* exchange = nullptr;
PyObject* tensor_type = nullptr;
PyObject* parameter_type = nullptr;
PyObject* is_neg = nullptr;
PyObject* torch_empty = nullptr;
PyObject* device_type = nullptr;
PyObject* dtype_name = nullptr;
// Functions of torch that return a number or a bool: 0 where nothing stands between Python and ops.
std::array<PyObject*, 5> modes = {};

constexpr struct {
  ScalarType type;
  dlpack::DataType raw;
  DType own;
  const char* name;
} kTypes[] = {
    {ScalarType::Double, {dlpack::kFloat, 64, 1}, DType::kFloat64, "float64"},
    {ScalarType::Float, {dlpack::kFloat, 32, 1}, DType::kFloat32, "float32"},
    {ScalarType::BFloat16, {dlpack::kBfloat, 16, 1}, DType::kBFloat16, "bfloat16"},
    {ScalarType::Half, {dlpack::kFloat, 16, 1}, DType::kFloat16, "float16"},
    {ScalarType::Bool, {dlpack::kBool, 8, 1}, DType::kBool, "bool"},
    {ScalarType::Byte, {dlpack::kUInt, 8, 1}, DType::kUInt8, "uint8"},
    {ScalarType::Char, {dlpack::kInt, 8, 1}, DType::kInt8, "int8"},
    {ScalarType::Short, {dlpack::kInt, 16, 1}, DType::kInt16, "int16"},
    {ScalarType::Int, {dlpack::kInt, 32, 1}, DType::kInt32, "int32"},
    {ScalarType::Long, {dlpack::kInt, 64, 1}, DType::kInt64, "int64"},
};

// The objects torch.float64 and so on, in the order of kTypes.
std::array<PyObject*, std::size(kTypes)> dtypes = {};

int row_of_type(ScalarType type) {
  int row = 0;
  while (kTypes[row].type != type) ++row;
  return row;
}

bool same(dlpack::DataType a, dlpack::DataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

PyObject* new_reference(PyObject* object) {
  Py_INCREF(object);
  return object;
}

bool is_true(PyObject* object) {
  const Object result(object);
  const int value = PyObject_IsTrue(result.get());
  if (value < 0) throw PythonError();
  return value != 0;
}

PyObject* attribute(PyObject* of, std::initializer_list<const char*> names) {
  Object object(new_reference(of));
  for (const char* name : names) object = Object(PyObject_GetAttrString(object.get(), name));
  return object.release();
}

// {"dtype": ..., "device": ...}, made once for each device.
PyObject* keywords_of(ScalarType dtype, const Device& device) {
  static auto* const made = new std::map<std::pair<int, int>, PyObject*>;
  const bool is_cpu = device.type == aoti_torch_device_type_cpu();
  const int row = row_of_type(dtype);
  PyObject*& keywords = (*made)[{row, is_cpu ? -1 : device.index}];
  if (keywords == nullptr) {
    const Object where(is_cpu ? PyObject_CallFunction(device_type, "s", "cpu")
                              : PyObject_CallFunction(device_type, "si", "cuda", device.index));
    keywords =
        Object(Py_BuildValue("{sOsO}", "dtype", dtypes[row], "device", where.get())).release();
  }
  return keywords;
}

Object tuple_of(const std::vector<int64_t>& sizes) {
  Object tuple(PyTuple_New(static_cast<Py_ssize_t>(sizes.size())));
  for (size_t i = 0; i < sizes.size(); ++i) {
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i),
                     Object(PyLong_FromLongLong(sizes[i])).release());
  }
  return tuple;
}

// torch.empty. Memory by way of the exchange table would be foreign to torch: its storage cannot be
// resized, and record_stream does not know it.
PyObject* allocated(const std::vector<int64_t>& sizes, ScalarType dtype, const Device& device) {
  const Object arguments(PyTuple_Pack(1, tuple_of(sizes).get()));
  return PyObject_Call(torch_empty, arguments.get(), keywords_of(dtype, device));
}

}  // namespace

PyTensor::PyTensor() : object_(new_reference(Py_None)) {}

PyTensor::PyTensor(PyObject* borrowed) : object_(new_reference(borrowed)) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(borrowed));
  if (type != tensor_type && type != parameter_type) throw NotPlain();
  if (exchange->from_python(borrowed, &tensor_) != 0) {
    PyErr_Clear();
    throw NotPlain();
  }
  const int32_t device = tensor_.device.type;
  if ((device != dlpack::kCpu && device != dlpack::kCuda) ||
      (tensor_.data == nullptr && numel() > 0) ||
      is_true(PyObject_Vectorcall(is_neg, &borrowed, 1, nullptr))) {
    throw NotPlain();
  }
  const dlpack::DataType& dtype = tensor_.dtype;
  if (dtype.bits == 8 && (dtype.code == dlpack::kInt || dtype.code == dlpack::kUInt)) {
    const Object own(PyObject_GetAttr(borrowed, dtype_name));
    if (own.get() != dtypes[row_of_type(scalar_type())]) throw NotPlain();
  }
}

PyTensor::PyTensor(const std::vector<int64_t>& sizes, ScalarType dtype, const Device& device)
    : object_(allocated(sizes, dtype, device)) {
  if (exchange->from_python(object_.get(), &tensor_) != 0) throw PythonError();
  poison(*this);
}

int64_t PyTensor::numel() const {
  int64_t n = 1;
  for (const int64_t size : sizes()) n *= size;
  return n;
}

bool PyTensor::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (int32_t i = tensor_.ndim; i-- > 0;) {
    if (tensor_.shape[i] != 1 && tensor_.strides[i] != expected) return false;
    expected *= tensor_.shape[i];
  }
  return true;
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

void require_plain_mode() {
  for (PyObject* const mode : modes) {
    if (is_true(PyObject_CallNoArgs(mode))) throw NotPlain();
  }
}

void find_torch() {
  const Object torch(PyImport_ImportModule("torch"));
  tensor_type = attribute(torch.get(), {"Tensor"});
  parameter_type = attribute(torch.get(), {"nn", "Parameter"});
  is_neg = attribute(tensor_type, {"is_neg"});
  torch_empty = attribute(torch.get(), {"empty"});
  device_type = attribute(torch.get(), {"device"});
  dtype_name = Object(PyUnicode_InternFromString("dtype")).release();
  for (size_t i = 0; i < dtypes.size(); ++i) dtypes[i] = attribute(torch.get(), {kTypes[i].name});
  modes = {attribute(torch.get(), {"_C", "_len_torch_function_stack"}),
           attribute(torch.get(), {"_C", "_len_torch_dispatch_stack"}),
           attribute(torch.get(), {"_C", "_are_functorch_transforms_active"}),
           attribute(torch.get(), {"_C", "_is_tracing"}),
           attribute(torch.get(), {"_C", "_autograd", "_profiler_enabled"})};
  const Object table(attribute(tensor_type, {"__dlpack_c_exchange_api__"}));
  const auto* const found = static_cast<const dlpack::Exchange*>(
      PyCapsule_GetPointer(table.get(), "dlpack_exchange_api"));
  if (found == nullptr) throw PythonError();
  if (found->version.major != 1) {
    PyErr_Format(PyExc_ImportError, "DLPack 1 is needed, this torch has %u", found->version.major);
    throw PythonError();
  }
  exchange = found;
}

}  // namespace klfast::binding
