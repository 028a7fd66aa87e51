"""The log-sum-exps of rows, from the numbers that the forward ops save.

A row of logits far from 0 is summed after its origin is subtracted. In one number, the origin would
take all digits of the log-sum-exp. So there are two numbers: ``far`` is the origin, and ``near`` is
the rest. Shapes: R rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LogSumExp(NamedTuple):
    """Log of the sum of exp(logits / temperature), in nats: ``far + near``, [R] each, fp64.

    ``near`` is -inf if all logits of a row are -inf, and NaN if a row has a NaN or +inf.
    """

    far: Tensor
    near: Tensor


class Units(NamedTuple):
    """The units in which kernels write ``saved`` (``klfast.ops.schemas``)."""

    scale: float = 1.0  # nats per unit in which kernels round 1 / temperature
    pairs: float = 1.0  # nats per unit of ``kl_divergence_fwd``'s log-sum-exps
    origin: float = 2.0  # logits per unit of ``token_logprobs_fwd``'s origin; 2 for the other op


UnitsOf = Mapping[torch.dtype, Units]  # the units of a backend's kernels, by the arithmetic's dtype
BIT = math.log(2)
NATIVE = {torch.float32: Units(scale=BIT, pairs=BIT), torch.float64: Units()}
TRITON = dict.fromkeys(NATIVE, Units(scale=BIT, origin=1.0))


def of_tokens(saved: Tensor, scale: float | Tensor, units: Units) -> LogSumExp:
    """Log-sum-exps from ``token_logprobs_fwd``'s saved numbers; ``rounded_scale`` has ``scale``."""
    origin, near = saved
    return LogSumExp(origin * (scale * units.origin), near)


def of_pairs(saved: Tensor, scale: float | Tensor, units: Units) -> tuple[LogSumExp, LogSumExp]:
    """Log-sum-exps of both models, from ``kl_divergence_fwd``'s saved numbers."""
    lse, shift, _, first_origin, second_origin = saved
    of_first, of_second = (origin * (scale * 2) for origin in (first_origin, second_origin))
    near = lse * units.pairs
    # For equal models both are the same number.
    return LogSumExp(of_first, near), LogSumExp(of_second, near + shift * units.pairs)


def rounded_scale(
    temperature: float, inverse: Tensor | None, dtype: torch.dtype, units: Units
) -> float | Tensor:
    """1 / temperature as kernels round it in the arithmetic's dtype: a number, [R] or 0-dim."""
    if inverse is not None:
        return (inverse / units.scale).to(dtype).to(torch.float64) * units.scale
    return torch.tensor(1 / temperature / units.scale, dtype=dtype).item() * units.scale
