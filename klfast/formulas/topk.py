"""Divergences from a teacher whose log-probs are known at K token ids per token.

Shapes: R tokens, K entries per token. p is the teacher, q the student, P and Q the sums of p and q
over a token's entries. All values are in nats, and in float64 if the device has it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from klfast.formulas.divergences import DIVERGENCE_TABLE, Direction, dropped_term, term
from klfast.formulas.estimators import zero_at
from klfast.types.dtypes import wide

# The least tail: half of the rounding of a probability of 1 in fp32.
LEAST_TAIL = 2.0**-24


def without_missing(mask: Tensor | None, exist: Tensor) -> Tensor:
    """A mask in which a token without entries does not exist. ``exist``: [..., K]."""
    has_entries = exist.any(-1)
    if mask is None:
        return has_entries
    return torch.where(has_entries, mask, torch.zeros((), dtype=mask.dtype, device=mask.device))


def divergence_of_entries(
    teacher: Tensor,
    student: Tensor,
    exist: Tensor,
    direction: Direction,
    tail: str,
    parameter: float = 0.5,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """[R] divergences of log-probs [R, K], where entries ``exist``, as the tables of
    :func:`klfast.topk_kl_divergence` have them.

    A divergence is 0 if the teacher's log-probs are the student's, rounded to ``dtype``.
    """
    # An entry that does not exist is -inf, and its terms would have gradients of NaN.
    p, q = torch.where(exist, teacher, 0.0), torch.where(exist, student, 0.0)
    are_equal = (p == wide(q.to(dtype))).all(-1)
    if tail == "bucket":
        p = torch.cat([p, log_tail(p, exist)], -1)
        q = torch.cat([q, log_tail(q, exist)], -1)
        exist = torch.cat([exist, exist.any(-1, keepdim=True)], -1)
    elif tail == "renormalize":
        p, q = p - _log_sum(p, exist), q - _log_sum(q, exist)
    x, y = (p, q) if direction.policy else (q, p)
    of = dropped_term if tail == "drop" else term
    terms = DIVERGENCE_TABLE[direction.divergence].terms(of, x, y, parameter)
    rows = torch.where(exist, terms, 0.0).sum(-1)
    # Rounding may make a divergence negative, or not 0 for equal entries. A dropped tail may be
    # negative.
    return zero_at(are_equal if tail == "drop" else are_equal | (rows < 0), rows)


def _log_sum(logprobs: Tensor, exist: Tensor) -> Tensor:
    """[R, 1] log of the sum of the entries' probabilities; 0 for a token without entries."""
    some = exist.any(-1, keepdim=True)
    return torch.where(exist | ~some, logprobs, -torch.inf).logsumexp(-1, keepdim=True)


def log_tail(logprobs: Tensor, exist: Tensor) -> Tensor:
    """[R, 1] log(1 - sum), accurate for a sum that is nearly 1. It is at least log(2^-24), and 0
    without a gradient if no entry has a probability.
    """
    # In fp32 a tail 1 - Q has few digits left, so the ops return log-probs of K ids in float64.
    greatest = math.log1p(-LEAST_TAIL)
    possible = exist & (logprobs != -torch.inf)
    log_sum = _log_sum(torch.where(possible, logprobs, 0.0), possible).clamp(max=greatest)
    log_sum = torch.where(possible.any(-1, keepdim=True), log_sum, -torch.inf)
    return (-log_sum.expm1()).log()
