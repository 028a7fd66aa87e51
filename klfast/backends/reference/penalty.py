"""The readable specification: textbook formulas in float64, differentiated by autograd.

Runs on any device that torch has, slowly. Tests hold the fast backends to it, and it to the oracle.
At an infinite log-ratio a formula has its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from klfast.args.estimator import Estimator
from klfast.args.penalty import PenaltyCall
from klfast.args.values import are_tracing
from klfast.formulas.estimators import FORMULAS
from klfast.formulas.sequences import Sequences, per_token, sum_of_sequences
from klfast.stats.kl import KLStats
from klfast.types.dtypes import arithmetic_dtype, wide


def kl_penalty(call: PenaltyCall) -> tuple[Tensor, KLStats | None]:
    """The penalty, and its statistics if asked for. See ``klfast.kl_penalty``."""
    tokens = _PenaltyTokens(call)
    value, clipped = _token_values(tokens, call.spec.estimator)
    value = value * tokens.weight
    if call.weights is not None:
        with torch.no_grad():  # a weight of 0 leaves the statistics as they are
            stats = kl_penalty(call._replace(weights=None))[1] if call.return_stats else None
        value = torch.where(tokens.keep, value * tokens.factor, 0.0)
    else:
        stats = _stats(value, clipped, tokens) if call.return_stats else None
    return _reduce(value, tokens, call).to(tokens.dtype), stats


class _PenaltyTokens:
    """The inputs as flat float64 vectors over tokens, with masked tokens replaced by zeros."""

    def __init__(self, call: PenaltyCall) -> None:
        logprobs, ref_logprobs, old_logprobs, mask, weights, cu_seqlens = call[:6]
        self.dtype = arithmetic_dtype(logprobs, ref_logprobs, old_logprobs)
        self.shape = logprobs.shape
        weight = torch.ones_like(logprobs) if mask is None else mask
        # Rounded to the arithmetic's dtype first, as the kernels read a mask.
        self.weight = wide(weight.detach().to(self.dtype)).flatten()
        self.keep = self.weight != 0
        self.sequences = Sequences(logprobs, cu_seqlens)
        if weights is not None:
            factor = per_token(weights, logprobs, cu_seqlens)
            self.factor = wide(factor.to(self.dtype)).flatten()
            self.keep = self.keep & (self.factor != 0)
        logprobs = wide(logprobs)
        self.log_ratio = self._difference(logprobs, ref_logprobs)
        self.log_weight = None  # log of the importance weight w
        if old_logprobs is not None:
            self.log_weight = self._difference(logprobs, old_logprobs)

    def _difference(self, a: Tensor, b: Tensor | None) -> Tensor:
        difference = a if b is None else a - b.to(a.dtype)
        # Selected and not multiplied: 0 times the NaN of a masked token would be NaN.
        return torch.where(self.keep, difference.flatten(), 0.0)


def _token_values(tokens: _PenaltyTokens, estimator: Estimator) -> tuple[Tensor, Tensor]:
    """W * f(x) per token with the estimator's gradient, and where a clip or cap acted."""
    x = tokens.log_ratio
    lo, hi = estimator.log_ratio_bounds
    below_or_above = (x < lo) | (x > hi)
    clipped_x, weight_of_value = x, None
    weight, limited = _importance(tokens, estimator)
    if estimator.clip_weighted:
        weight_of_value = weight
    if estimator.log_ratio_clip is not None:
        clipped_x = torch.where(tokens.keep, x.clamp(lo, hi), 0.0)
        if estimator.clip_weighted:
            # A value that the clip acts on has no gradient, and none through its weight.
            inside = (x >= lo) & (x <= hi)
            weight_of_value = torch.where(inside, weight, weight.detach())
    formula = _with_linear_tail(FORMULAS[estimator.name], estimator.linear_tail)
    value, outside = _clip_value(formula, clipped_x, weight_of_value, estimator.kl_clip)
    weighted = value if estimator.clip_weighted else weight * value
    if estimator.gradient == "k2":
        weighted = _WithGradientOf.apply(weighted, weight * FORMULAS["k2"](x))  # type: ignore[no-untyped-call]
    return weighted, below_or_above | outside | limited


class _WithGradientOf(torch.autograd.Function):
    """A value with another's gradient, also where the other is infinite and a difference NaN."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, other: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def _with_linear_tail(
    formula: Callable[[Tensor], Tensor], tail: float | None
) -> Callable[[Tensor], Tensor]:
    """f, continued on its tangents beyond abs(x) = tail."""
    if tail is None:
        return formula

    def tailed(x: Tensor) -> Tensor:
        beyond = x.abs() > tail
        nearest = x.detach().clamp(-tail, tail)
        on_tangent = formula(nearest) + _slope(formula, nearest) * (x - nearest)
        # f sees no x beyond the tail: its derivative may overflow, and 0 times infinity is NaN.
        return torch.where(beyond, on_tangent, formula(torch.where(beyond, nearest, x)))

    return tailed


def _slope(formula: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The derivative of f at x, which has no graph."""
    if are_tracing():
        slope: Tensor = torch.func.grad(lambda x: formula(x).sum())(x)
        return slope
    with torch.inference_mode(False), torch.enable_grad():  # torch.func would import dynamo
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(formula(leaf).sum(), leaf)[0]


def _clip_value(
    formula: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None, limit: float | None
) -> tuple[Tensor, Tensor]:
    """``weight * f(x)`` clipped to [-limit, limit], and where it was clipped.

    f is differentiated where the product is inside alone: the derivative outside may have
    overflowed, and 0 times infinity is NaN.
    """
    weight = torch.ones_like(x) if weight is None else weight
    if limit is None:
        return weight * formula(x), torch.zeros_like(x, dtype=torch.bool)
    unclipped = weight.detach() * formula(x.detach())
    inside = unclipped.abs() <= limit
    value = weight * formula(torch.where(inside, x, 0.0))
    return torch.where(inside, value, unclipped.clamp(-limit, limit)), unclipped.abs() > limit


def _importance(tokens: _PenaltyTokens, estimator: Estimator) -> tuple[Tensor, Tensor]:
    """The weight w, 1 without old log-probs, and where a cap or ``clip_weighted`` changed it."""
    log_weight = tokens.log_weight
    if log_weight is None:
        return torch.ones_like(tokens.log_ratio), torch.zeros_like(tokens.keep)
    limited = torch.zeros_like(tokens.keep)
    if estimator.importance_cap is not None:
        log_cap = math.log(estimator.importance_cap)
        limited = log_weight > log_cap
        log_weight = log_weight.clamp(max=log_cap)
    if estimator.clip_weighted:
        # Negated, so that NaN is dropped too.
        dropped = ~(log_weight <= math.log(torch.finfo(tokens.dtype).max))
        log_weight = torch.where(dropped, -torch.inf, log_weight)
        limited = limited | dropped
    if estimator.importance == "detached":
        log_weight = log_weight.detach()
    return log_weight.exp(), limited


def _reduce(value: Tensor, tokens: _PenaltyTokens, call: PenaltyCall) -> Tensor:
    """Coef * reduction of the weighted token values."""
    reduction, coef, normalizer = call.spec[1:]
    if isinstance(coef, Tensor):
        coef = coef.to(value.dtype)
    value = (coef if call.scores is None else -coef) * value
    if call.scores is not None:
        value = _add_at_last_kept_token(value, call.scores, tokens)
    if reduction.result == "token":
        return value.reshape(tokens.shape)
    sums, length = tokens.sequences.sum(value), tokens.sequences.sum(tokens.weight)
    if reduction.own_length:
        sums = sums / torch.where(length > 0, length, 1.0)
    if reduction.result == "sequence":
        return sums
    if reduction.over == "one":
        return sum_of_sequences(sums)
    if normalizer is not None:
        return sum_of_sequences(sums) / normalizer
    count = sum_of_sequences(reduction.denominator_terms(length).to(length.dtype))
    # A batch without kept tokens has a mean of 0.
    return torch.where(count > 0, sum_of_sequences(sums) / count, 0.0)


def _add_at_last_kept_token(value: Tensor, scores: Tensor, tokens: _PenaltyTokens) -> Tensor:
    """Value with scores[s] added at the last kept token of sequence s, if it has one."""
    position = torch.arange(value.shape[0], device=value.device)
    last = tokens.sequences.greatest(torch.where(tokens.keep, position, -1), -1)
    score = tokens.sequences.spread(scores.to(value.dtype))
    return torch.where(position == tokens.sequences.spread(last), value + score, value)


def _stats(value: Tensor, clipped: Tensor, tokens: _PenaltyTokens) -> KLStats:
    value, x, weight = value.detach(), tokens.log_ratio.detach(), tokens.weight

    def total(per_token: Tensor) -> Tensor:
        return tokens.sequences.sum(per_token.to(weight.dtype)).to(tokens.dtype)

    return KLStats(
        kl=total(value),
        length=total(weight),
        k1=total(weight * FORMULAS["k1"](x)),
        k2=total(weight * FORMULAS["k2"](x)),
        k3=total(weight * FORMULAS["k3"](x)),
        max_abs_log_ratio=tokens.sequences.greatest(x.abs(), 0.0).to(tokens.dtype),
        clipped=total(clipped & tokens.keep),
        nonfinite=total(~(x.isfinite() & value.to(tokens.dtype).isfinite())),
    )
