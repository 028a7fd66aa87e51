"""The textbook formulas of the estimators, of which autograd makes the derivatives.

The stable forms and the analytic derivatives stand in ``csrc/formulas/estimators.h`` and in
``klfast/backends/triton/math.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "abs": lambda x: x.abs(),
    "k2": lambda x: x.square() / 2,
    "k3": lambda x: torch.expm1(-x) + x,
    "k3_ref": lambda x: torch.expm1(x) - x,
    "r_log_r": lambda x: torch.exp(x) * x.clamp(min=-1000),  # e^x x is 0 at -infinity
}
"""f(x) of every name in ``klfast.names.ESTIMATORS``, x = logprobs - ref_logprobs."""
