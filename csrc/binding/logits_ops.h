// The binding of the kernels over logits to torch. penalty_ops.h is the binding of the kernels over
// log-probs. A device brings
//   static void run(const Call&, const Device&)
// for every call of logits/call.h.

#pragma once

#include "binding/penalty_ops.h"
#include "formulas/divergences.h"
#include "logits/call.h"

namespace klfast::binding {

inline Logits logits_of(const Tensor& tensor, const Tensor& like, const char* argument) {
  const Device own = device_of(tensor);
  const Device device = device_of(like);
  KLFAST_CHECK(own.type == device.type && own.index == device.index, argument,
               " must be on the device of logits");
  KLFAST_CHECK(tensor.dim() == 3, argument, " must be [A, T, V]");
  KLFAST_CHECK(have_one_shape(tensor, like), argument, " must have the shape of logits");
  Logits logits;
  logits.data = tensor.numel() > 0 ? tensor.const_data_ptr() : "";
  logits.dtype = dtype_of(tensor, argument);
  KLFAST_CHECK(holds_floats(logits.dtype), argument, " must be floating");
  logits.outer_stride = tensor.stride(0);
  logits.inner_stride = tensor.stride(1);
  logits.word_stride = tensor.stride(2);
  return logits;
}

// The data of an argument with one element per row or per pick: contiguous and of the given dtype.
// Null if the argument is absent.
inline const void* per_row(const OptionalTensor& tensor, const Tensor& logits, DType dtype,
                           const char* argument, int64_t picks = 1) {
  if (!tensor.has_value()) return nullptr;
  const int64_t elements = logits.size(0) * logits.size(1) * picks;
  const bool has_shape = tensor->dim() == 1 || (tensor->dim() == 2 && tensor->size(1) == picks);
  KLFAST_CHECK(has_shape && tensor->numel() == elements, argument, " must have ", elements,
               " elements");
  const View view = view_of(*tensor, device_of(logits), argument);
  KLFAST_CHECK(view.dtype == dtype, argument, " has another dtype than the kernels read");
  KLFAST_CHECK(tensor->is_contiguous(), argument, " must be contiguous");
  return view.data;
}

inline const double* saved_of(const Tensor& saved, const Tensor& logits, int fields) {
  const int64_t rows = logits.size(0) * logits.size(1);
  KLFAST_CHECK(
      saved.dim() == 2 && saved.size(0) == fields && saved.size(1) == rows && saved.is_contiguous(),
      "saved must be [", fields, ", R]");
  const View view = view_of(saved, device_of(logits), "saved");
  KLFAST_CHECK(view.dtype == DType::kFloat64, "saved must be float64");
  return static_cast<const double*>(view.data);
}

// Sets 1 / temperature, either from a number or from a tensor. The kernels read the tensor: it has
// no dimensions if one value serves all rows, and shape [R] if each row has its own.
inline void set_temperature(RowInputs& in, const Tensor& logits, double temperature,
                            const OptionalTensor& inverse_temperature) {
  in.inverse_temperature = 1 / temperature;
  if (inverse_temperature.has_value()) {
    constexpr const char* kName = "inverse_temperature";
    in.has_temperatures = inverse_temperature->dim() > 0;
    const void* const at = in.has_temperatures
                               ? per_row(inverse_temperature, logits, DType::kFloat64, kName)
                               : scalar_of(inverse_temperature, device_of(logits), kName).data;
    KLFAST_CHECK(dtype_of(*inverse_temperature, kName) == DType::kFloat64, kName,
                 " must be float64");
    in.inverse_temperature_at = static_cast<const double*>(at);
    return;
  }
  const double own =
      in.is_double ? in.inverse_temperature : static_cast<float>(in.inverse_temperature);
  KLFAST_CHECK(own > 0 && std::isfinite(own), "temperature must be > 0, and in range");
}

// Sets the token ids of the rows: [R] holds one per row, [R, picks] holds several.
inline void set_token_ids(RowInputs& in, const Tensor& logits, const OptionalTensor& token_ids) {
  if (!token_ids.has_value()) return;
  in.may_lack_ids = token_ids->dim() == 2;
  in.picks = in.may_lack_ids ? token_ids->size(1) : 1;
  in.token_ids =
      static_cast<const int64_t*>(per_row(token_ids, logits, DType::kInt64, "token_ids", in.picks));
}

inline RowInputs rows_of(const Tensor& logits, const OptionalTensor& token_ids,
                         const OptionalTensor& keep, double temperature,
                         const OptionalTensor& inverse_temperature, bool is_double) {
  KLFAST_CHECK(logits.dim() == 3 && logits.size(2) > 0, "logits must be [A, T, V] with V > 0");
  RowInputs in;
  in.shape = {logits.size(0), logits.size(1), logits.size(2)};
  in.keep = static_cast<const uint8_t*>(per_row(keep, logits, DType::kBool, "keep"));
  in.is_double = is_double;
  set_token_ids(in, logits, token_ids);
  set_temperature(in, logits, temperature, inverse_temperature);
  return in;
}

inline ScalarType arithmetic(bool is_double) {
  return is_double ? ScalarType::Double : ScalarType::Float;
}

inline DType results_dtype(bool is_double) { return is_double ? DType::kFloat64 : DType::kFloat32; }

// A tensor of results per row. Its shape is [0] if it is not wanted.
inline Tensor empty_rows(const Tensor& logits, ScalarType dtype, bool wanted) {
  return empty({wanted ? logits.size(0) * logits.size(1) : 0}, dtype, device_of(logits));
}

inline void* data_of(const Tensor& tensor) {
  return tensor.numel() > 0 ? tensor.mutable_data_ptr() : nullptr;
}

template <typename On>
std::tuple<Tensor, Tensor, Tensor> token_logprobs_fwd(Tensor logits, Tensor token_ids,
                                                      OptionalTensor keep, double temperature,
                                                      bool want_entropy,
                                                      OptionalTensor inverse_temperature) {
  TokenLogprobsForward call;
  call.logits = logits_of(logits, logits, "logits");
  const bool is_double = call.logits.dtype == DType::kFloat64;
  call.in = rows_of(logits, token_ids, keep, temperature, inverse_temperature, is_double);
  const ScalarType of_picks = arithmetic(call.in.has_double_picks());
  Tensor logprobs = empty({token_ids.numel()}, of_picks, device_of(logits));
  Tensor entropy = empty_rows(logits, arithmetic(is_double), want_entropy);
  Tensor saved =
      empty({WordSaved::kCount, call.in.shape.rows()}, ScalarType::Double, device_of(logits));
  call.logprobs = data_of(logprobs);
  call.entropy = data_of(entropy);
  call.saved = static_cast<double*>(data_of(saved));
  if (call.in.shape.rows() > 0) On::run(call, device_of(logits));
  return {logprobs, entropy, saved};
}

template <typename On>
void token_logprobs_backward(const Tensor& logits, const Tensor& token_ids,
                             const OptionalTensor& keep, const Tensor& saved,
                             const Tensor& logprobs, const Tensor& entropy, double temperature,
                             const OptionalTensor& grad_logprobs,
                             const OptionalTensor& grad_entropy,
                             const OptionalTensor& inverse_temperature,
                             const OptionalTensor& grad_lse, const Tensor& grad) {
  TokenLogprobsBackward call;
  call.logits = logits_of(logits, logits, "logits");
  const bool is_double = call.logits.dtype == DType::kFloat64;
  call.in = rows_of(logits, token_ids, keep, temperature, inverse_temperature, is_double);
  const DType dtype = results_dtype(is_double);
  const DType of_picks = results_dtype(call.in.has_double_picks());
  call.saved = saved_of(saved, logits, WordSaved::kCount);
  const int64_t picks = call.in.picks;
  call.logprobs = per_row(logprobs, logits, of_picks, "logprobs", picks);
  call.grad_logprobs = per_row(grad_logprobs, logits, of_picks, "grad_logprobs", picks);
  call.grad_entropy = per_row(grad_entropy, logits, dtype, "grad_entropy");
  call.grad_lse = per_row(grad_lse, logits, of_picks, "grad_lse");
  if (call.grad_entropy != nullptr) call.entropy = per_row(entropy, logits, dtype, "entropy");
  call.grad = output_of(grad);
  if (call.in.shape.rows() > 0) On::run(call, device_of(logits));
}

template <typename On>
Tensor token_logprobs_bwd(Tensor logits, Tensor token_ids, OptionalTensor keep, Tensor saved,
                          Tensor logprobs, Tensor entropy, double temperature,
                          OptionalTensor grad_logprobs, OptionalTensor grad_entropy,
                          OptionalTensor inverse_temperature, OptionalTensor grad_lse) {
  Tensor grad = *empty_gradient(logits, true);
  token_logprobs_backward<On>(logits, token_ids, keep, saved, logprobs, entropy, temperature,
                              grad_logprobs, grad_entropy, inverse_temperature, grad_lse, grad);
  return grad;
}

template <typename On>
void token_logprobs_bwd_(Tensor logits, Tensor token_ids, OptionalTensor keep, Tensor saved,
                         Tensor logprobs, Tensor entropy, double temperature,
                         OptionalTensor grad_logprobs, OptionalTensor grad_entropy,
                         OptionalTensor inverse_temperature, OptionalTensor grad_lse) {
  KLFAST_CHECK(logits.is_contiguous(), "logits must be contiguous to be written over");
  token_logprobs_backward<On>(logits, token_ids, keep, saved, logprobs, entropy, temperature,
                              grad_logprobs, grad_entropy, inverse_temperature, grad_lse, logits);
}

inline DivergenceInputs divergence_of(const Tensor& logits, const Tensor& ref_logits,
                                      const OptionalTensor& token_ids, const OptionalTensor& keep,
                                      int64_t divergence, double parameter, double temperature,
                                      int64_t entropy_of,
                                      const OptionalTensor& inverse_temperature) {
  using divergences::DivergenceTable;
  DivergenceInputs in;
  in.first = logits_of(logits, logits, "logits");
  in.second = logits_of(ref_logits, logits, "ref_logits");
  const bool is_double = in.first.dtype == DType::kFloat64 || in.second.dtype == DType::kFloat64;
  in.rows = rows_of(logits, token_ids, keep, temperature, inverse_temperature, is_double);
  KLFAST_CHECK(in.rows.picks == 1, "token_ids must be [R]");
  in.divergence = choice_of<int>(divergence, DivergenceTable::kSize, "divergence");
  KLFAST_CHECK(parameter > 0 && parameter < 1, "parameter must be between 0 and 1");
  in.parameter = parameter;
  in.entropy_of = choice_of<EntropyOf>(entropy_of, kEntropies, "entropy_of");
  visit_row(DivergenceTable(), in.divergence, [&](auto row) {
    KLFAST_CHECK(!decltype(row)::kPolicyIsFirst || in.entropy_of != EntropyOf::kSecond,
                 "entropy_of must not be the second model of a JSD or a total variation");
  });
  return in;
}

inline constexpr int64_t kNoEntropy = static_cast<int64_t>(EntropyOf::kNone);

// Gradients in the memory of the logits, which must be contiguous. The two models must not share
// memory.
inline Gradients gradients_in_place(const Tensor& logits, const Tensor& ref_logits, bool want_grad,
                                    bool want_grad_ref) {
  KLFAST_CHECK(!want_grad || logits.is_contiguous(),
               "logits must be contiguous to be written over");
  KLFAST_CHECK(!want_grad_ref || ref_logits.is_contiguous(),
               "ref_logits must be contiguous to be written over");
  KLFAST_CHECK(logits.numel() == 0 || logits.const_data_ptr() != ref_logits.const_data_ptr(),
               "logits must not be ref_logits where one is written over");
  Gradients grads;
  if (want_grad) grads.first = logits;
  if (want_grad_ref) grads.second = ref_logits;
  return grads;
}

// A forward returns these besides gradients: rows, log-probs under both models, saved, entropy.
using DivergenceResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <typename On>
DivergenceResults run_divergence_forward(const Tensor& logits, const DivergenceInputs& divergence,
                                         const OptionalTensor& row_weights,
                                         const Gradients& grads) {
  DivergenceForward call;
  call.in = divergence;
  const RowInputs& in = call.in.rows;
  KLFAST_CHECK(row_weights.has_value() || !(grads.first.has_value() || grads.second.has_value()),
               "gradients need row_weights");
  const bool want_entropy = call.in.entropy_of != EntropyOf::kNone;
  KLFAST_CHECK(!(want_entropy && row_weights.has_value()), "entropies do not go with row_weights");
  const ScalarType dtype = arithmetic(in.is_double);
  Tensor rows = empty_rows(logits, dtype, true);
  Tensor logprobs = empty_rows(logits, dtype, in.token_ids != nullptr);
  Tensor ref_logprobs = empty_rows(logits, dtype, in.token_ids != nullptr);
  Tensor saved = empty({Saved::kCount, in.shape.rows()}, ScalarType::Double, device_of(logits));
  Tensor entropy = empty_rows(logits, dtype, want_entropy);
  call.rows = data_of(rows);
  call.logprobs = data_of(logprobs);
  call.ref_logprobs = data_of(ref_logprobs);
  call.entropy = data_of(entropy);
  call.saved = static_cast<double*>(data_of(saved));
  call.row_weights = per_row(row_weights, logits, results_dtype(in.is_double), "row_weights");
  call.grad_first = output_of(grads.first);
  call.grad_second = output_of(grads.second);
  if (in.shape.rows() > 0) On::run(call, device_of(logits));
  return {rows, logprobs, ref_logprobs, saved, entropy};
}

template <typename On>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> kl_divergence_fwd(
    Tensor logits, Tensor ref_logits, OptionalTensor token_ids, OptionalTensor keep,
    int64_t divergence, double parameter, double temperature, int64_t entropy_of,
    OptionalTensor row_weights, bool want_grad, bool want_grad_ref,
    OptionalTensor inverse_temperature) {
  const auto in = divergence_of(logits, ref_logits, token_ids, keep, divergence, parameter,
                                temperature, entropy_of, inverse_temperature);
  const Gradients grads = empty_gradients(logits, ref_logits, want_grad, want_grad_ref);
  auto [rows, logprobs, ref_logprobs, saved, entropy] =
      run_divergence_forward<On>(logits, in, row_weights, grads);
  const Tensor grad = or_empty(grads.first, rows), grad_ref = or_empty(grads.second, rows);
  return {rows, logprobs, ref_logprobs, saved, grad, grad_ref, entropy};
}

template <typename On>
std::tuple<Tensor, Tensor> kl_divergence_fwd_(Tensor logits, Tensor ref_logits, OptionalTensor keep,
                                              int64_t divergence, double parameter,
                                              double temperature, Tensor row_weights,
                                              bool want_grad, bool want_grad_ref,
                                              OptionalTensor inverse_temperature) {
  const Gradients grads = gradients_in_place(logits, ref_logits, want_grad, want_grad_ref);
  const auto in = divergence_of(logits, ref_logits, std::nullopt, keep, divergence, parameter,
                                temperature, kNoEntropy, inverse_temperature);
  const auto results = run_divergence_forward<On>(logits, in, row_weights, grads);
  return {std::get<0>(results), std::get<3>(results)};
}

// A backward without the gradients of log-probs and entropies.
inline DivergenceBackward backward_of(const Tensor& logits, const DivergenceInputs& in,
                                      const Tensor& rows, const Tensor& saved,
                                      const OptionalTensor& grad_rows,
                                      const OptionalTensor& grad_lse,
                                      const OptionalTensor& grad_ref_lse, const Gradients& grads) {
  const DType dtype = results_dtype(in.rows.is_double);
  DivergenceBackward call;
  call.in = in;
  call.rows = per_row(rows, logits, dtype, "rows");
  call.saved = saved_of(saved, logits, Saved::kCount);
  call.grad_rows = per_row(grad_rows, logits, dtype, "grad_rows");
  call.grad_lse = per_row(grad_lse, logits, dtype, "grad_lse");
  call.grad_ref_lse = per_row(grad_ref_lse, logits, dtype, "grad_ref_lse");
  call.grad_first = output_of(grads.first);
  call.grad_second = output_of(grads.second);
  return call;
}

template <typename On>
std::tuple<Tensor, Tensor> kl_divergence_bwd(
    Tensor logits, Tensor ref_logits, OptionalTensor token_ids, OptionalTensor keep,
    int64_t divergence, double parameter, double temperature, int64_t entropy_of, Tensor rows,
    Tensor saved, OptionalTensor entropy, OptionalTensor grad_rows, OptionalTensor grad_logprobs,
    OptionalTensor grad_ref_logprobs, OptionalTensor grad_entropy, bool want_grad,
    bool want_grad_ref, OptionalTensor inverse_temperature, OptionalTensor grad_lse,
    OptionalTensor grad_ref_lse) {
  const auto in = divergence_of(logits, ref_logits, token_ids, keep, divergence, parameter,
                                temperature, entropy_of, inverse_temperature);
  const Gradients grads = empty_gradients(logits, ref_logits, want_grad, want_grad_ref);
  auto call = backward_of(logits, in, rows, saved, grad_rows, grad_lse, grad_ref_lse, grads);
  const DType dtype = results_dtype(in.rows.is_double);
  KLFAST_CHECK(
      token_ids.has_value() || !(grad_logprobs.has_value() || grad_ref_logprobs.has_value()),
      "gradients of tokens' log-probs go with token_ids");
  call.grad_logprobs = per_row(grad_logprobs, logits, dtype, "grad_logprobs");
  call.grad_ref_logprobs = per_row(grad_ref_logprobs, logits, dtype, "grad_ref_logprobs");
  if (grad_entropy.has_value()) {
    KLFAST_CHECK(in.entropy_of != EntropyOf::kNone && entropy.has_value(),
                 "grad_entropy goes with entropy and entropy_of");
    call.grad_entropy = per_row(grad_entropy, logits, dtype, "grad_entropy");
    call.entropy = per_row(entropy, logits, dtype, "entropy");
  }
  if (in.rows.shape.rows() > 0) On::run(call, device_of(logits));
  return {or_undefined(grads.first), or_undefined(grads.second)};
}

template <typename On>
void kl_divergence_bwd_(Tensor logits, Tensor ref_logits, OptionalTensor keep, int64_t divergence,
                        double parameter, double temperature, Tensor rows, Tensor saved,
                        Tensor grad_rows, bool want_grad, bool want_grad_ref,
                        OptionalTensor inverse_temperature, OptionalTensor grad_lse,
                        OptionalTensor grad_ref_lse) {
  const Gradients grads = gradients_in_place(logits, ref_logits, want_grad, want_grad_ref);
  const auto in = divergence_of(logits, ref_logits, std::nullopt, keep, divergence, parameter,
                                temperature, kNoEntropy, inverse_temperature);
  const auto call = backward_of(logits, in, rows, saved, grad_rows, grad_lse, grad_ref_lse, grads);
  if (in.rows.shape.rows() > 0) On::run(call, device_of(logits));
}

template <typename On, typename Library>
void implement_logits(Library& library) {
  add<&token_logprobs_fwd<On>>(library, "token_logprobs_fwd");
  add<&token_logprobs_bwd<On>>(library, "token_logprobs_bwd");
  add<&token_logprobs_bwd_<On>>(library, "token_logprobs_bwd_");
  add<&kl_divergence_fwd<On>>(library, "kl_divergence_fwd");
  add<&kl_divergence_fwd_<On>>(library, "kl_divergence_fwd_");
  add<&kl_divergence_bwd<On>>(library, "kl_divergence_bwd");
  add<&kl_divergence_bwd_<On>>(library, "kl_divergence_bwd_");
}

}  // namespace klfast::binding
