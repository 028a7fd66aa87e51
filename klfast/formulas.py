"""The textbook formulas of the estimators, of which autograd makes the derivatives.

The stable forms and the analytic derivatives stand in ``csrc/formulas/estimators.h`` and in
``klfast/backends/triton/math.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def zero_at(places: Tensor, value: Tensor) -> Tensor:
    """The value, exactly 0 at ``places``. No derivative changes."""
    return torch.where(places, value - value.detach(), value)


def _k3(x: Tensor) -> Tensor:
    """expm1(-x) + x; 0 where an inexact expm1 leaves less."""
    value = torch.expm1(-x) + x
    return zero_at(value < 0, value)


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "abs": lambda x: x.abs(),
    "k2": lambda x: x.square() / 2,
    "k3": _k3,
    "k3_ref": lambda x: _k3(-x),
    "r_log_r": lambda x: torch.exp(x) * x.clamp(min=-1000),  # e^x x is 0 at -infinity
}
"""f(x) of every name in ``klfast.names.ESTIMATORS``, x = logprobs - ref_logprobs."""
