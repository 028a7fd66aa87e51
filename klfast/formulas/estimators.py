"""The textbook formulas of the estimators. Autograd computes their derivatives.

The stable forms and the analytic derivatives are in ``csrc/formulas/estimators.h`` and in
``klfast/backends/triton/math.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def zero_at(places: Tensor, value: Tensor) -> Tensor:
    """The value, exactly 0 at ``places``. Derivatives do not change."""
    return torch.where(places, value - value.detach(), value)


def exp_minus_1_minus(y: Tensor) -> Tensor:
    """e^y - 1 - y, at least 0 despite an inexact expm1. In float32 a series for abs(y) <= 1."""
    if y.dtype != torch.float64:
        is_near = y.abs() <= 1
        near = torch.where(is_near, y, 0.0)
        series = torch.ones_like(near)
        for n in range(12, 2, -1):
            series = 1 + near / n * series
        y = torch.where(is_near, 0.0, y)
        return torch.where(is_near, near.square() / 2 * series, _far(y))
    value = _far(y)
    return zero_at(value < 0, value)


def _far(y: Tensor) -> Tensor:
    return torch.expm1(y) - y.clamp(max=1000)  # infinity from there on, not infinity less infinity


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "abs": lambda x: x.abs(),
    "k2": lambda x: x * x / 2,  # whose derivative does not overflow where x does not
    "k3": lambda x: exp_minus_1_minus(-x),
    "k3_ref": exp_minus_1_minus,
    "r_log_r": lambda x: torch.exp(x) * x.clamp(min=-1000),  # e^x x is 0 at -infinity
}
"""f(x) of every name in ``klfast.types.names.ESTIMATORS``, x = logprobs - ref_logprobs."""
