"""The truth about ``topk_kl_divergence``: each tail the textbook way, in float64.

p is the teacher's probability of an entry, q the student's, a sum over the vocabulary beneath. What
the student has left, 1 - Q, is here the sum of all its other words, which cancels nothing.

Tolerances follow from the student's log-probs, which klfast keeps in the arithmetic's dtype: what
their errors do to a divergence is its slope in each, and to a slope the second derivatives.
Shapes: R tokens, K entries, V words.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import oracle
import torch
from oracle_divergences import Words
from oracle_logits import Sums, of_rows, shares
from torch import Tensor

LEAST_TAIL = 2.0**-24


class Truth(NamedTuple):
    """A call in float64, each with how far a backend may be from it."""

    result: Tensor
    result_tolerance: Tensor
    kl: Tensor  # of the statistics
    kl_tolerance: Tensor
    length: Tensor
    length_tolerance: Tensor
    grad: Tensor
    grad_tolerance: Tensor
    grad_ref: Tensor
    grad_ref_tolerance: Tensor


def x_log_x_over_y(x, y):
    """0 where x is 0, whatever y is."""
    is_there = x > 0
    x, y = torch.where(is_there, x, 1.0), torch.where(is_there, y, 1.0)
    return torch.where(is_there, x * (x / y).log(), 0.0)


def compared(tail, p, q, rest):
    """What of teacher and student is compared, [..., K] or [..., K + 1]. ``rest``: 1 - Q."""
    if tail == "bucket":
        left = (1 - p.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
        return torch.cat([p, left], -1), torch.cat([q, rest.clamp(min=LEAST_TAIL)], -1)
    if tail == "renormalize":
        return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return p, q


def divergence(direction, tail, beta, p, q, rest):
    """D of a token, as the table in ``klfast.topk_kl_divergence`` has it. What sums to 1 has no
    -x + y; a bucket has it where the floor of its rest makes that more than 1.
    """
    p, q = compared(tail, p, q, rest)

    def of(x, y):
        terms = x_log_x_over_y(x, y)
        return (terms if tail in ("drop", "renormalize") else terms - x + y).sum(-1)

    if direction == "forward":
        return of(p, q)
    if direction == "reverse":
        return of(q, p)
    m = (1 - beta) * q + beta * p
    return (1 - beta) * of(q, m) + beta * of(p, m)


class Rows(NamedTuple):
    """Divergences [R], their slopes in the log-probs of student and teacher [R, K], and errors."""

    value: Tensor
    error: Tensor
    slope: Tensor
    slope_error: Tensor
    ref_slope: Tensor
    ref_slope_error: Tensor


def of_each_row(direction, tail, beta, logprobs, ref_logprobs, exist, rest, error):
    """``error``: of a log-prob, [R, K]; that of ``rest`` follows from it."""
    rows = []
    for row in zip(logprobs, ref_logprobs, exist, rest, error, strict=True):
        rows.append(_of_row(direction, tail, beta, *row))
    return Rows(*(torch.stack(part) for part in zip(*rows, strict=True)))


def _of_row(direction, tail, beta, logprobs, ref_logprobs, exist, rest, error):
    zero = torch.zeros_like(logprobs)
    if not exist.any():
        return zero.sum(), zero.sum(), zero, zero, zero, zero
    student, teacher, off = (t[exist] for t in (logprobs, ref_logprobs, error))
    count = student.numel()

    def of(x):
        """Of both models' log-probs, one behind the other. The rest is what the entries leave."""
        q, p = x[:count].exp(), x[count:].exp()
        return divergence(direction, tail, beta, p, q, rest + (student.exp() - q).sum())

    x = torch.cat([student, teacher])
    slopes = torch.autograd.functional.jacobian(of, x)
    curvature = torch.autograd.functional.hessian(of, x)[:, :count].abs() @ off
    rounding = 64 * oracle.unit_roundoff(torch.float64)  # the textbook cancels
    slope_errors = curvature + rounding * (1 + slopes.abs())
    spread = [zero.masked_scatter(exist, t) for t in (slopes, slope_errors)]
    ref_spread = [zero.masked_scatter(exist, t[count:]) for t in (slopes, slope_errors)]
    value_error = slopes[:count].abs() @ off + off @ curvature[:count] + rounding
    return (of(x), value_error, *spread, *ref_spread)


def topk_kl_divergence(
    logits,
    ref_token_ids,
    ref_logprobs,
    mask=None,
    *,
    direction="forward",
    tail="bucket",
    jsd_beta=0.5,
    temperature=1.0,
    reduction="none",
    cu_seqlens=None,
    normalizer=None,
    coef=1.0,
    upstream=None,
) -> Truth:
    """What klfast.topk_kl_divergence must return, and the gradients for ``upstream``, by default
    ones.
    """
    dtype, shape = oracle.arithmetic_dtype(logits), logits.shape[:-1]
    exist = ref_logprobs > -math.inf
    kept = exist.any(-1) if mask is None else exist.any(-1) & (mask != 0)
    flat = ref_token_ids.shape[-1]
    exist = (exist & kept[..., None]).reshape(-1, flat)
    ids = torch.where(exist, ref_token_ids.reshape(-1, flat).long(), 0)
    temperature = of_rows(temperature, shape)
    if isinstance(temperature, Tensor):
        temperature = torch.where(kept.reshape(-1, 1), temperature, 1.0)
    words = Words(torch.where(kept[..., None], logits, 0.0), temperature, dtype)
    others = words.p.masked_fill(
        torch.zeros_like(words.p).scatter_add_(-1, ids, exist.double()) > 0, 0.0
    )
    teacher = torch.where(exist, ref_logprobs.detach().double().reshape(-1, flat), 0.0)
    of_teacher = 1 / torch.as_tensor(temperature if tail == "renormalize" else 1.0).double()
    teacher = teacher * of_teacher
    off = words.unit * (3 * words.distance + 3 * words.logprobs.abs() + 8) + words.textbook
    off = torch.where(words.logprobs == -math.inf, 0.0, off)  # exactly
    options = (direction, tail, jsd_beta)
    rows = of_each_row(
        *options,
        words.logprobs.gather(-1, ids),
        teacher,
        exist,
        others.sum(-1, keepdim=True),
        off.gather(-1, ids),
    )

    weights = kept.to(dtype) if mask is None else torch.where(kept, mask, 0)
    layout = {"cu_seqlens": cu_seqlens}
    reducing = {"reduction": reduction, "normalizer": normalizer, "coef": coef, **layout}
    share, *lengths = shares(shape, dtype, weights, **reducing)
    sums = Sums(shape, reduction, cu_seqlens)
    value = torch.where(kept.flatten(), rows.value, 0.0)
    error = rows.error + 4 * oracle.unit_roundoff(dtype) * value.abs()
    result, tolerance = sums.of(share * value, share.abs() * error, dtype)
    own, *_ = shares(shape, dtype, weights, reduction="seq-sum", **layout)
    statistics = Sums(shape, "seq-sum", cu_seqlens).of(own * value, own * error, dtype)

    grad_out = torch.ones_like(result) if upstream is None else upstream
    factor = (share * sums.spread(grad_out))[:, None]
    unit = 16 * oracle.unit_roundoff(dtype)
    slope, slope_error = factor * rows.slope, factor.abs() * rows.slope_error
    slope_error = slope_error + unit * slope.abs()
    total, total_error = slope.sum(-1, keepdim=True), slope_error.sum(-1, keepdim=True)
    grad = -total * words.p
    grad = grad.scatter_add(-1, ids, torch.where(exist, slope, 0.0)) / temperature
    grad_error = words.p * (total_error + total.abs() * (words.relative + unit))
    grad_error = grad_error.scatter_add(-1, ids, torch.where(exist, slope_error, 0.0))
    to_ref = factor * rows.ref_slope * of_teacher
    to_ref_error = (factor.abs() * rows.ref_slope_error) * of_teacher + unit * to_ref.abs()
    return Truth(
        *(result, tolerance),
        *statistics,
        *lengths,
        *(t.reshape(logits.shape) for t in (grad, grad_error / temperature)),
        *(t.reshape(ref_logprobs.shape) for t in (to_ref, to_ref_error)),
    )
