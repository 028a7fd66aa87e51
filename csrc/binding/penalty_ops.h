// The binding of the kernels to torch, on LibTorch's stable ABI: what the ops of every device do
// before and after their kernels. A device brings
//   static void forward(KlPenaltyInputs, const KlPenaltyForward&, const Device&)
//   static void backward(KlPenaltyInputs, const KlPenaltyBackward&, const Device&)
//   static void token_weights(const KlPenaltyInputs&, void* weights, const Device&)
//   static void scale(const Output&, int64_t n, const View& factor, const Device&)
//   static constexpr bool kGradientsReadWeights: a forward that writes gradients needs their memory
//
// Python checks the arguments first and has the error messages. The checks here protect memory,
// because anyone can call torch.ops.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/places.h"
#include "device/cpu/huge_pages.h"
#include "formulas/estimators.h"
#include "penalty/call.h"

namespace klfast::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

#define KLFAST_CHECK(condition, ...) STD_TORCH_CHECK(condition, "klfast: ", __VA_ARGS__)

inline DType dtype_of(const Tensor& tensor, const char* argument) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Bool:
      return DType::kBool;
    case ScalarType::Byte:
      return DType::kUInt8;
    case ScalarType::Char:
      return DType::kInt8;
    case ScalarType::Short:
      return DType::kInt16;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Long:
      return DType::kInt64;
    default:
      break;
  }
  KLFAST_CHECK(false, argument, " has a dtype that the kernels do not read");
}

// The device that a call runs on.
struct Device {
  int32_t type;
  int32_t index;
};

inline Device device_of(const Tensor& tensor) {
  Device device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  return device;
}

inline View view_of(const Tensor& tensor, const Device& device, const char* argument) {
  const Device own = device_of(tensor);
  KLFAST_CHECK(own.type == device.type && own.index == device.index, argument,
               " must be on the device of the call");
  KLFAST_CHECK(tensor.dim() <= 2, argument, " must have at most 2 dimensions");
  View view;
  view.data = tensor.numel() > 0 ? tensor.const_data_ptr() : "";
  KLFAST_CHECK(view.data != nullptr, argument, " has no memory");
  view.dtype = dtype_of(tensor, argument);
  view.row_stride = tensor.dim() == 2 ? tensor.stride(0) : 0;
  view.column_stride = tensor.dim() > 0 ? tensor.stride(tensor.dim() - 1) : 0;
  return view;
}

// A one-dimensional input of n elements.
inline View row_of(const Tensor& tensor, int64_t n, const Device& device, const char* argument) {
  KLFAST_CHECK(tensor.dim() == 1 && tensor.numel() == n, argument, " must have ", n, " elements");
  return view_of(tensor, device, argument);
}

inline bool have_one_shape(const Tensor& a, const Tensor& b) {
  return std::equal(a.sizes().begin(), a.sizes().end(), b.sizes().begin(), b.sizes().end());
}

inline View view_like(const OptionalTensor& tensor, const Tensor& logprobs, const char* argument) {
  if (!tensor.has_value()) return View();
  KLFAST_CHECK(have_one_shape(*tensor, logprobs), argument, " must have the shape of logprobs");
  return view_of(*tensor, device_of(logprobs), argument);
}

// The weights of tokens: in the shape of the log-probs, or [S, 1].
inline View weighting_of(const OptionalTensor& tensor, const Tensor& logprobs, int64_t sequences) {
  if (!tensor.has_value()) return View();
  const bool of_sequences =
      tensor->dim() == 2 && tensor->size(0) == sequences && tensor->size(1) == 1;
  View view = of_sequences ? view_of(*tensor, device_of(logprobs), "weights")
                           : view_like(tensor, logprobs, "weights");
  KLFAST_CHECK(holds_floats(view.dtype), "weights must be floating");
  if (of_sequences) view.column_stride = 0;
  return view;
}

inline View scalar_of(const OptionalTensor& tensor, const Device& device, const char* argument) {
  if (!tensor.has_value()) return View();
  KLFAST_CHECK(tensor->dim() == 0, argument, " must be 0-dimensional");
  return view_of(*tensor, device, argument);
}

inline Batch batch_of(const Tensor& logprobs, const OptionalTensor& cu_seqlens) {
  Batch batch;
  batch.tokens = logprobs.numel();
  if (!cu_seqlens.has_value()) {
    KLFAST_CHECK(logprobs.dim() == 1 || logprobs.dim() == 2, "logprobs must be [B, T] or [N]");
    batch.sequences = logprobs.dim() == 2 ? logprobs.size(0) : 1;
    batch.width = logprobs.size(logprobs.dim() - 1);
    return batch;
  }
  KLFAST_CHECK(logprobs.dim() == 1, "logprobs must be [N] with cu_seqlens");
  KLFAST_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->numel() >= 1, "cu_seqlens must be [S+1]");
  KLFAST_CHECK(cu_seqlens->is_contiguous(), "cu_seqlens must be contiguous");
  const DType dtype = view_of(*cu_seqlens, device_of(logprobs), "cu_seqlens").dtype;
  KLFAST_CHECK(dtype == DType::kInt64 || dtype == DType::kInt32,
               "cu_seqlens must be int32 or int64");
  batch.sequences = cu_seqlens->numel() - 1;
  batch.cu_seqlens = cu_seqlens->const_data_ptr();
  batch.cu_seqlens_is_int64 = dtype == DType::kInt64;
  return batch;
}

// Decodes a choice, which is passed as its position in a list.
template <typename Choice>
Choice choice_of(int64_t position, int64_t choices, const char* argument) {
  KLFAST_CHECK(position >= 0 && position < choices, argument, " must be from 0 to ", choices - 1);
  return static_cast<Choice>(position);
}

// Decodes a limit of an estimator. The largest double means no limit, because some formats have no
// infinity.
inline double limit_of(double limit) {
  const bool is_none = std::abs(limit) >= std::numeric_limits<double>::max();
  return is_none ? std::copysign(INFINITY, limit) : limit;
}

template <typename T>
void check_size(const std::vector<T>& given, size_t size, const char* argument) {
  KLFAST_CHECK(given.size() == size, argument, " must hold ", size, " numbers");
}

inline EstimatorOptions options_of(const std::vector<int64_t>& choices,
                                   const std::vector<double>& numbers) {
  using Choice = PenaltyChoice;
  using Number = PenaltyNumber;
  EstimatorOptions options;
  options.estimator =
      choice_of<int>(choices[Choice::kEstimator], estimators::EstimatorTable::kSize, "estimator");
  options.gradient = choice_of<Gradient>(choices[Choice::kGradient], kGradients, "gradient");
  options.importance = choice_of<ImportanceGradient>(choices[Choice::kImportance],
                                                     kImportanceGradients, "importance");
  options.clip_weighted = choice_of<bool>(choices[Choice::kClipWeighted], 2, "clip_weighted");
  options.importance_cap = limit_of(numbers[Number::kImportanceCap]);
  options.log_ratio_low = limit_of(numbers[Number::kLogRatioLow]);
  options.log_ratio_high = limit_of(numbers[Number::kLogRatioHigh]);
  options.linear_tail = limit_of(numbers[Number::kLinearTail]);
  options.kl_clip = limit_of(numbers[Number::kKlClip]);
  return options;
}

// Decodes klfast.args.penalty.Choices and Numbers.
inline void decode(const std::vector<int64_t>& choices, const std::vector<double>& numbers,
                   KlPenaltyInputs& in) {
  using Choice = PenaltyChoice;
  check_size(choices, Choice::kCount, "choices");
  check_size(numbers, PenaltyNumber::kCount, "numbers");
  in.options = options_of(choices, numbers);
  in.reduction.result = choice_of<Result>(choices[Choice::kResult], kResults, "result");
  in.reduction.own_length = choice_of<bool>(choices[Choice::kOwnLength], 2, "own_length");
  in.reduction.over = choice_of<Denominator>(choices[Choice::kOver], kDenominators, "over");
  in.coef = numbers[PenaltyNumber::kCoef];
  in.normalizer = numbers[PenaltyNumber::kNormalizer];
}

// The inputs of a call without its log-probs: batch, mask and options, for tokens in the shape of
// `like`.
inline KlPenaltyInputs reduction_of(const Tensor& like, const OptionalTensor& mask,
                                    const OptionalTensor& weighting,
                                    const OptionalTensor& cu_seqlens, const OptionalTensor& coef,
                                    const OptionalTensor& normalizer,
                                    const std::vector<int64_t>& choices,
                                    const std::vector<double>& numbers) {
  KlPenaltyInputs in;
  const Device device = device_of(like);
  in.batch = batch_of(like, cu_seqlens);
  in.mask = view_like(mask, like, "mask");
  in.weighting = weighting_of(weighting, like, in.batch.sequences);
  decode(choices, numbers, in);
  in.coef_tensor = scalar_of(coef, device, "coef");
  in.normalizer_tensor = scalar_of(normalizer, device, "normalizer");
  return in;
}

inline KlPenaltyInputs inputs_of(const Tensor& logprobs, const OptionalTensor& ref_logprobs,
                                 const OptionalTensor& old_logprobs, const OptionalTensor& mask,
                                 const OptionalTensor& weighting, const OptionalTensor& cu_seqlens,
                                 const OptionalTensor& coef, const OptionalTensor& normalizer,
                                 const std::vector<int64_t>& choices,
                                 const std::vector<double>& numbers) {
  KlPenaltyInputs in =
      reduction_of(logprobs, mask, weighting, cu_seqlens, coef, normalizer, choices, numbers);
  const Device device = device_of(logprobs);
  in.logprobs = view_of(logprobs, device, "logprobs");
  in.ref_logprobs = view_like(ref_logprobs, logprobs, "ref_logprobs");
  in.old_logprobs = view_like(old_logprobs, logprobs, "old_logprobs");
  for (const View* view : {&in.logprobs, &in.ref_logprobs, &in.old_logprobs}) {
    if (view->data == nullptr) continue;
    KLFAST_CHECK(holds_floats(view->dtype), "log-probs must be floating");
    in.is_double = in.is_double || view->dtype == DType::kFloat64;
  }
  return in;
}

// Checks that the kernels can compute with coef and normalizer.
inline void check_numbers(const KlPenaltyInputs& in) {
  const double largest =
      in.is_double ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  KLFAST_CHECK(std::abs(in.coef) <= largest, "coef must be finite");
  KLFAST_CHECK(in.normalizer >= 0 && std::isfinite(in.normalizer), "normalizer must be finite");
}

// Fills memory with NaN in tests, so that an element that is never written shows. An integer in
// such memory is huge and positive, as an index that no guard for negative indices stops.
inline void poison([[maybe_unused]] const Tensor& tensor) {
#ifdef KLFAST_POISON
  auto* const bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
  const int64_t size = tensor.numel() * element_size(dtype_of(tensor, ""));
  for (int64_t i = 0; i < size; ++i) bytes[i] = i % 4 == 3 ? 0x7f : 0xff;
#endif
}

// Calls the allocator directly. An op call through the dispatcher would cost some microseconds.
inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype, const Device& device) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device.type,
      device.index, &handle));
  Tensor tensor(handle);
  poison(tensor);
  return tensor;
}

// A gradient of the input's shape, if it is wanted.
inline OptionalTensor empty_gradient(const Tensor& input, bool wanted) {
  if (!wanted) return std::nullopt;
  const Device device = device_of(input);
  const std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  Tensor gradient = empty(sizes, input.scalar_type(), device);
  if (device.type == aoti_torch_device_type_cpu()) {
    const int64_t bytes = gradient.numel() * element_size(dtype_of(gradient, "gradient"));
    cpu::prefer_huge_pages(gradient.mutable_data_ptr(), bytes);
  }
  return gradient;
}

// A backward returns this for a gradient that is not wanted. Python sees None.
inline Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

// A forward returns an empty tensor for an output that is not wanted. torch.jit takes no None.
inline Tensor or_empty(const OptionalTensor& tensor, const Tensor& result) {
  return tensor.has_value() ? *tensor : empty({0}, result.scalar_type(), device_of(result));
}

inline Output output_of(const OptionalTensor& tensor) {
  if (!tensor.has_value() || tensor->numel() == 0) return Output();
  return {tensor->mutable_data_ptr(), dtype_of(*tensor, "output")};
}

// The gradients of both models' inputs. Each is absent if it is not wanted.
struct Gradients {
  OptionalTensor first;
  OptionalTensor second;
};

inline Gradients empty_gradients(const Tensor& first, const OptionalTensor& second, bool want_first,
                                 bool want_second) {
  KLFAST_CHECK(second.has_value() || !want_second, "there is no ref_logprobs to have a gradient");
  return {empty_gradient(first, want_first), empty_gradient(second.value_or(first), want_second)};
}

template <typename On>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> kl_penalty_fwd(
    Tensor logprobs, OptionalTensor ref_logprobs, OptionalTensor old_logprobs, OptionalTensor mask,
    OptionalTensor weighting, OptionalTensor cu_seqlens, OptionalTensor coef,
    OptionalTensor normalizer, std::vector<int64_t> choices, std::vector<double> numbers,
    OptionalTensor scores, bool want_weights, bool want_grad_logprobs, bool want_grad_ref_logprobs,
    bool want_statistics) {
  KlPenaltyInputs in = inputs_of(logprobs, ref_logprobs, old_logprobs, mask, weighting, cu_seqlens,
                                 coef, normalizer, choices, numbers);
  const Device device = device_of(logprobs);
  in.negate = scores.has_value();  // the penalty is subtracted from the score
  const int64_t sequences = in.batch.sequences;
  const ScalarType acc = in.is_double ? ScalarType::Double : ScalarType::Float;
  const Result kind = in.reduction.result;
  KLFAST_CHECK(!scores.has_value() || kind == Result::kToken,
               "scores go with a result per token alone");
  KLFAST_CHECK(kind == Result::kScalar || !(want_grad_logprobs || want_grad_ref_logprobs),
               "only scalar reductions have a unit gradient");
  std::vector<int64_t> sizes;
  if (kind == Result::kToken) sizes.assign(logprobs.sizes().begin(), logprobs.sizes().end());
  if (kind == Result::kSequence) sizes = {sequences};
  Tensor result = empty(sizes, acc, device);
  OptionalTensor weights, statistics;
  if (want_weights) weights = empty({sequences}, acc, device);
  if (want_statistics) statistics = empty({kStatistics, sequences}, acc, device);
  const Gradients gradients =
      empty_gradients(logprobs, ref_logprobs, want_grad_logprobs, want_grad_ref_logprobs);

  KlPenaltyForward out;
  if (scores.has_value()) out.scores = row_of(*scores, sequences, device, "scores");
  out.result = result.mutable_data_ptr();
  OptionalTensor scratch;
  if (want_weights) {
    out.weights = weights->mutable_data_ptr();
  } else if (On::kGradientsReadWeights && (want_grad_logprobs || want_grad_ref_logprobs)) {
    scratch = empty({sequences}, acc, device);
    out.weights = scratch->mutable_data_ptr();
  }
  if (want_statistics) out.statistics = statistics->mutable_data_ptr();
  out.grad_logprobs = output_of(gradients.first);
  out.grad_ref_logprobs = output_of(gradients.second);
  On::forward(in, out, device);
  return {result, or_empty(weights, result), or_empty(statistics, result),
          or_empty(gradients.first, result), or_empty(gradients.second, result)};
}

template <typename On>
std::tuple<Tensor, Tensor> kl_penalty_bwd(Tensor logprobs, OptionalTensor ref_logprobs,
                                          OptionalTensor old_logprobs, OptionalTensor mask,
                                          OptionalTensor weighting, OptionalTensor cu_seqlens,
                                          OptionalTensor coef, OptionalTensor normalizer,
                                          std::vector<int64_t> choices, std::vector<double> numbers,
                                          Tensor grad_out, Tensor weights, bool want_grad_logprobs,
                                          bool want_grad_ref_logprobs) {
  const KlPenaltyInputs in = inputs_of(logprobs, ref_logprobs, old_logprobs, mask, weighting,
                                       cu_seqlens, coef, normalizer, choices, numbers);
  const Device device = device_of(logprobs);
  KlPenaltyBackward out;
  out.weights = row_of(weights, in.batch.sequences, device, "weights");
  switch (in.reduction.result) {
    case Result::kToken:
      out.grad_out = view_like(OptionalTensor(grad_out), logprobs, "grad_out");
      break;
    case Result::kSequence:
      out.grad_out = row_of(grad_out, in.batch.sequences, device, "grad_out");
      break;
    case Result::kScalar:
      out.grad_out = scalar_of(OptionalTensor(grad_out), device, "grad_out");
      break;
  }
  const DType acc = in.is_double ? DType::kFloat64 : DType::kFloat32;
  KLFAST_CHECK(out.weights.dtype == acc, "weights must have the dtype of the result");
  KLFAST_CHECK(out.grad_out.dtype == acc, "grad_out must have the dtype of the result");
  const Gradients gradients =
      empty_gradients(logprobs, ref_logprobs, want_grad_logprobs, want_grad_ref_logprobs);
  out.grad_logprobs = output_of(gradients.first);
  out.grad_ref_logprobs = output_of(gradients.second);
  On::backward(in, out, device);
  return {or_undefined(gradients.first), or_undefined(gradients.second)};
}

template <typename On>
Tensor token_weights(Tensor like, OptionalTensor mask, OptionalTensor weighting,
                     OptionalTensor cu_seqlens, OptionalTensor coef, OptionalTensor normalizer,
                     std::vector<int64_t> choices, std::vector<double> numbers, bool is_double) {
  KlPenaltyInputs in =
      reduction_of(like, mask, weighting, cu_seqlens, coef, normalizer, choices, numbers);
  KLFAST_CHECK(in.reduction.result == Result::kScalar, "only scalar reductions have token weights");
  in.is_double = is_double;
  const ScalarType acc = is_double ? ScalarType::Double : ScalarType::Float;
  Tensor weights = empty({in.batch.tokens}, acc, device_of(like));
  if (in.batch.tokens > 0) On::token_weights(in, weights.mutable_data_ptr(), device_of(like));
  return weights;
}

template <typename On>
void scale_(Tensor tensor, Tensor factor) {
  const Device device = device_of(tensor);
  KLFAST_CHECK(tensor.is_contiguous(), "tensor must be contiguous");
  const View view = scalar_of(OptionalTensor(factor), device, "factor");
  const Output output = output_of(tensor);
  if (output.data == nullptr) return;
  KLFAST_CHECK(holds_floats(output.dtype), "tensor must be floating");
  On::scale(output, tensor.numel(), view, device);
}

// The number of arguments of each op. klfast/ops/load.py compares it with the op's schema.
inline std::map<std::string, size_t>& arities() {
  static std::map<std::string, size_t> arities;
  return arities;
}

template <typename Result, typename... Arguments>
constexpr size_t arity(Result (*)(Arguments...)) {
  return sizeof...(Arguments);
}

// Implements an op by a function.
template <auto op, typename Library>
void add(Library& library, const char* name) {
  library.impl(name, TORCH_BOX(op));
  arities()[name] = arity(op);
}

// Implements the ops of a dispatch key. Their schemas are in klfast/ops/schemas.py.
template <typename On, typename Library>
void implement(Library& library) {
  add<&kl_penalty_fwd<On>>(library, "kl_penalty_fwd");
  add<&kl_penalty_bwd<On>>(library, "kl_penalty_bwd");
  add<&token_weights<On>>(library, "token_weights");
  add<&scale_<On>>(library, "scale_");
}

}  // namespace klfast::binding
