"""The value and gradient of one token in Triton, under every option of ``klfast.Estimator``.

``evaluate_token`` in ``csrc/formulas/token.h`` has the same algebra.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from klfast.backends.triton.math import clamp, exp, k2_derivative, k2_sum


class Form(NamedTuple):
    """The constants of a kernel beyond the estimator's formula: the limits that are there."""

    weighs: bool  # with old log-probs
    detached: bool
    caps: bool
    clips_log_ratio: bool
    linear_tail: bool
    clips_value: bool
    clip_weighted: bool
    k2_gradient: bool
    log_largest: float  # exp of more than this overflows the arithmetic of the call


@triton.jit
def importance_weight(log_importance, keep, cap, log_cap, FORM: tl.constexpr):
    """(w, where a limit made it a constant)."""
    importance = exp(log_importance)
    limited = keep & False
    log_weight = log_importance
    if FORM.caps:
        limited = keep & (log_importance > log_cap)
        importance = tl.where(limited, cap, importance)
        log_weight = tl.where(limited, log_cap, log_importance)
    if FORM.clip_weighted:
        fits = log_weight <= FORM.log_largest
        importance = tl.where(fits, importance, 0.0)
        limited |= keep & (fits == 0)
    return importance, limited


@triton.jit
def evaluate(
    x,
    log_importance,
    weight,
    keep,
    limits,
    VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    SUM: tl.constexpr,
    FORM: tl.constexpr,
):
    """(weighted value, its derivatives by logprobs and by -ref_logprobs, where a limit acted).

    ``limits``: (low, high, tail, clip, cap, log_cap) in the arithmetic's type.
    """
    low, high, tail, clip, cap, log_cap = limits
    # A clip lets NaN pass, as torch.clamp does.
    limited = keep & False
    alive = x == x if FORM.clips_log_ratio else keep | True
    clipped_x = x
    if FORM.clips_log_ratio:
        limited = keep & ((x < low) | (x > high))
        alive = (x >= low) & (x <= high)
        clipped_x = tl.where(keep, clamp(x, low, high), 0.0)
    near_x = clipped_x
    if FORM.linear_tail:
        near_x = clamp(clipped_x, -tail, tail)
    slope = DERIVATIVE(near_x)
    f = VALUE(near_x)
    in_tail = keep & False
    if FORM.linear_tail:
        in_tail = (clipped_x < -tail) | (clipped_x > tail)
        f += tl.where(in_tail, (clipped_x - near_x) * slope, 0.0)

    importance = tl.full(x.shape, 1.0, x.dtype)
    weight_limited = keep & False
    if FORM.weighs:
        importance, weight_limited = importance_weight(log_importance, keep, cap, log_cap, FORM)
    scale = weight * importance
    scale_of_clipped = scale
    clipped = f  # what kl_clip acts on
    if FORM.clip_weighted:
        scale_of_clipped = weight
        clipped = importance * f
    if FORM.clips_value:
        limited |= keep & (tl.abs(clipped) > clip)
        alive &= tl.abs(clipped) <= clip
        clipped = clamp(clipped, -clip, clip)

    # The derivative of w f(x) by a log-prob is w (f + f'), and by the reference's it is -w f'.
    through_x = tl.where(alive, slope, 0.0)
    if FORM.k2_gradient:
        through_x = k2_derivative(x)
    through_both = through_x
    if FORM.weighs and not FORM.detached:
        if FORM.k2_gradient:
            through_both = k2_sum(x)
        else:
            through_weight = clipped
            if FORM.clip_weighted:
                through_weight = tl.where(alive, f, 0.0)
            through_both = tl.where(alive & ~in_tail, SUM(near_x), through_weight + through_x)
        through_both = tl.where(weight_limited, through_x, through_both)
    value = scale_of_clipped * clipped
    return value, scale * through_both, scale * through_x, limited | weight_limited


@triton.jit
def is_extreme(x):
    """Beyond this the weight or the formula may leave fp32's range where their product does not."""
    return tl.abs(x) > 80


@triton.jit
def evaluate_tile(
    x,
    log_importance,
    weight,
    keep,
    limits,
    VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    SUM: tl.constexpr,
    FORM: tl.constexpr,
):
    """``evaluate``, where a weighted fp32 token with an extreme ratio is computed again in fp64.

    Which one is depends on the token alone.
    """
    value, grad, grad_ref, limited = evaluate(
        x, log_importance, weight, keep, limits, VALUE, DERIVATIVE, SUM, FORM
    )
    if FORM.weighs and x.dtype == tl.float32:
        extreme = is_extreme(x) | is_extreme(log_importance)
        if tl.max(extreme.to(tl.int32), axis=0) > 0:
            wide_limits = ()
            for i in tl.static_range(6):
                wide_limits = wide_limits + (limits[i].to(tl.float64),)
            wide_value, wide_grad, wide_grad_ref, wide_limited = evaluate(
                x.to(tl.float64),
                log_importance.to(tl.float64),
                weight.to(tl.float64),
                keep,
                wide_limits,
                VALUE,
                DERIVATIVE,
                SUM,
                FORM,
            )
            value = tl.where(extreme, wide_value.to(tl.float32), value)
            grad = tl.where(extreme, wide_grad.to(tl.float32), grad)
            grad_ref = tl.where(extreme, wide_grad_ref.to(tl.float32), grad_ref)
            limited = (extreme & wide_limited) | (~extreme & limited)
    return value, grad, grad_ref, limited
