#include "binding/direct.h"

#include <algorithm>
#include <exception>
#include <map>
#include <string>

#include "binding/py_tensor.h"
#ifndef KLFAST_EMULATE_CUDA  // by tests/support/emulator: the CPU is the CUDA device
#include "binding/cpu.h"
#endif
#if defined(KLFAST_CUDA) || defined(KLFAST_EMULATE_CUDA)
#include "binding/cuda.h"
#endif

namespace klfast::binding {
namespace {

// Arguments of Python to those of an op. What is no argument of the op is the dispatcher's to
// refuse.

[[noreturn]] void refuse() {
  PyErr_Clear();
  throw NotPlain();
}

template <typename T>
struct Argument;

template <>
struct Argument<PyTensor> {
  static PyTensor of(PyObject* object) { return PyTensor(object); }
};

template <>
struct Argument<std::optional<PyTensor>> {
  static std::optional<PyTensor> of(PyObject* object) {
    if (object == Py_None) return std::nullopt;
    return PyTensor(object);
  }
};

template <>
struct Argument<bool> {
  static bool of(PyObject* object) {
    const int value = PyObject_IsTrue(object);
    if (value < 0) throw PythonError();
    return value != 0;
  }
};

template <>
struct Argument<int64_t> {
  static int64_t of(PyObject* object) {
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) refuse();
    return value;
  }
};

template <>
struct Argument<double> {
  static double of(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred()) refuse();
    return value;
  }
};

template <typename T>
struct Argument<std::vector<T>> {
  static std::vector<T> of(PyObject* object) {
    if (!PyTuple_Check(object)) throw NotPlain();
    std::vector<T> values(PyTuple_GET_SIZE(object));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = Argument<T>::of(PyTuple_GET_ITEM(object, i));
    }
    return values;
  }
};

// Results of an op to Python.

inline PyObject* to_python(PyTensor&& result) { return result.release(); }

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

// Other threads of Python run while a kernel does.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// A device of the ops whose kernels run without the GIL.
template <typename On>
struct WithoutGilOn {
  static constexpr bool kGradientsReadWeights = On::kGradientsReadWeights;
  template <typename In, typename Out>
  static void forward(const In& in, const Out& out, const Device& device) {
    const WithoutGil without;
    On::forward(in, out, device);
  }
  template <typename In, typename Out>
  static void backward(const In& in, const Out& out, const Device& device) {
    const WithoutGil without;
    On::backward(in, out, device);
  }
  static void token_weights(const KlPenaltyInputs& in, void* weights, const Device& device) {
    const WithoutGil without;
    On::token_weights(in, weights, device);
  }
  static void scale(const Output& x, int64_t n, const View& factor, const Device& device) {
    const WithoutGil without;
    On::scale(x, n, factor, device);
  }
  template <typename Call>
  static void run(const Call& call, const Device& device) {
    const WithoutGil without;
    On::run(call, device);
  }
};

#ifdef KLFAST_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

// The device of a call, its first tensor's.
bool is_on_cuda(const PyTensor& first) { return first.raw().device.type == dlpack::kCuda; }

template <auto op, typename Arguments>
PyObject* apply(Arguments&& arguments) {
  using Result = decltype(std::apply(op, std::forward<Arguments>(arguments)));
  if constexpr (std::is_void_v<Result>) {
    std::apply(op, std::forward<Arguments>(arguments));
    Py_RETURN_NONE;
  } else {
    return to_python(std::apply(op, std::forward<Arguments>(arguments)));
  }
}

template <auto on_cpu, auto on_cuda, typename Result, typename... Arguments, size_t... i>
PyObject* call(Result (*)(Arguments...), PyObject* const* given, std::index_sequence<i...>) {
  require_plain_mode();
  std::tuple<Arguments...> arguments{Argument<Arguments>::of(given[i])...};
  if (is_on_cuda(std::get<0>(arguments))) {
    if (!kHasCuda) throw NotPlain();  // the dispatcher says so
    return apply<on_cuda>(std::move(arguments));
  }
  return apply<on_cpu>(std::move(arguments));
}

template <typename Result, typename... Arguments>
constexpr size_t arity(Result (*)(Arguments...)) {
  return sizeof...(Arguments);
}

// A function of Python over an op: NotImplemented where only the dispatcher serves, and where the
// op raises an error, which the dispatcher's op says once more. Errors of Python, such as want of
// memory, are raised.
template <auto on_cpu, auto on_cuda>
PyObject* function(PyObject*, PyObject* const* arguments, Py_ssize_t n) {
  constexpr Py_ssize_t expected = arity(on_cpu);
  if (n > expected) {
    PyErr_Format(PyExc_TypeError, "klfast: expected at most %zd arguments, got %zd", expected, n);
    return nullptr;
  }
  PyObject* given[expected];  // schemas have None for what is left out
  std::fill(std::copy(arguments, arguments + n, given), given + expected, Py_None);
  try {
    return call<on_cpu, on_cuda>(on_cpu, given, std::make_index_sequence<expected>());
  } catch (const NotPlain&) {
    Py_RETURN_NOTIMPLEMENTED;
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::exception&) {
    Py_RETURN_NOTIMPLEMENTED;
  }
}

PyMethodDef method(const char* name,
                   PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

#ifdef KLFAST_EMULATE_CUDA
using OnCpu = WithoutGilOn<Cuda>;
using LogitsOnCpu = WithoutGilOn<CudaLogits>;
using RolloutOnCpu = WithoutGilOn<CudaRollout>;
#else
using OnCpu = WithoutGilOn<Cpu>;
using LogitsOnCpu = WithoutGilOn<CpuLogits>;
using RolloutOnCpu = WithoutGilOn<CpuRollout>;
#endif
#ifdef KLFAST_CUDA
using OnGpu = WithoutGilOn<Cuda>;
using LogitsOnGpu = WithoutGilOn<CudaLogits>;
using RolloutOnGpu = WithoutGilOn<CudaRollout>;
#else  // never called
using OnGpu = OnCpu;
using LogitsOnGpu = LogitsOnCpu;
using RolloutOnGpu = RolloutOnCpu;
#endif

#define KLFAST_OPS(X)                              \
  X(kl_penalty_fwd, OnCpu, OnGpu)                  \
  X(kl_penalty_bwd, OnCpu, OnGpu)                  \
  X(token_weights, OnCpu, OnGpu)                   \
  X(scale_, OnCpu, OnGpu)                          \
  X(token_logprobs_fwd, LogitsOnCpu, LogitsOnGpu)  \
  X(token_logprobs_bwd, LogitsOnCpu, LogitsOnGpu)  \
  X(token_logprobs_bwd_, LogitsOnCpu, LogitsOnGpu) \
  X(kl_divergence_fwd, LogitsOnCpu, LogitsOnGpu)   \
  X(kl_divergence_fwd_, LogitsOnCpu, LogitsOnGpu)  \
  X(kl_divergence_bwd, LogitsOnCpu, LogitsOnGpu)   \
  X(kl_divergence_bwd_, LogitsOnCpu, LogitsOnGpu)  \
  X(rollout_correction, RolloutOnCpu, RolloutOnGpu)

#define KLFAST_METHOD(op, Cpu, Gpu) method(#op, function<&op<Cpu, PyTensor>, &op<Gpu, PyTensor>>),
#define KLFAST_ARITY(op, Cpu, Gpu) {#op, arity(&op<Cpu, PyTensor>)},

PyMethodDef methods[] = {KLFAST_OPS(KLFAST_METHOD){}};

const std::map<std::string, size_t> arities_of_ops = {KLFAST_OPS(KLFAST_ARITY)};

}  // namespace
}  // namespace klfast::binding

namespace klfast::direct {

const std::map<std::string, size_t>& arities() { return binding::arities_of_ops; }

bool add_to(PyObject* module) {
  try {
    binding::find_torch();
    return PyModule_AddFunctions(module, binding::methods) == 0;
  } catch (const binding::PythonError&) {
    return false;
  }
}

}  // namespace klfast::direct
