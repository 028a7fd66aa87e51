"""The log-sum-exps of rows, from what the forward ops save of them.

A row of logits far from 0 is summed less its origin, which takes all digits of a log-sum-exp of
one number. So there are two: ``far``, what the origin is, and ``near``, the rest. Shapes: R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class LogSumExp(NamedTuple):
    """Log of the sum of exp(logits / temperature), in nats: ``far + near``, [R] each, fp64.

    ``near`` is -inf of a row of nothing but -inf, and NaN of a row that has a NaN or +inf.
    """

    far: Tensor
    near: Tensor


class Units(NamedTuple):
    """The units in which kernels write ``saved`` (``klfast.ops.schemas``)."""

    scale: float = 1.0
    """Nats of the unit in which they round 1 / temperature to the arithmetic's dtype."""
    pairs: float = 1.0
    """Nats of the unit of ``kl_divergence_fwd``'s log-sum-exps."""
    origin: float = 2.0
    """Logits of the unit of ``token_logprobs_fwd``'s origin; the other op's is 2."""


UnitsOf = Callable[[Tensor, torch.dtype], Units]
"""The units in which kernels save, of a tensor on the device and the arithmetic's dtype."""
NATS = Units()
"""Of the CPU's kernels, and of CUDA's in fp64."""
BITS = Units(scale=math.log(2), pairs=math.log(2))
"""Of CUDA's kernels in fp32."""
TRITON = Units(scale=math.log(2), origin=1.0)
"""Of Triton's kernels."""


def in_nats(logits: Tensor, dtype: torch.dtype) -> Units:
    """The units of kernels that save nats, whatever the logits and the arithmetic's dtype are."""
    return NATS


def of_cuda(dtype: torch.dtype) -> Units:
    """The units of CUDA's kernels, in arithmetic of a dtype."""
    return BITS if dtype == torch.float32 else NATS


def of_tokens(saved: Tensor, scale: float | Tensor, units: Units) -> LogSumExp:
    """Of what ``token_logprobs_fwd`` saved; ``scale``: of ``rounded_scale``."""
    origin, near = saved
    return LogSumExp(origin * (scale * units.origin), near)


def of_pairs(saved: Tensor, scale: float | Tensor, units: Units) -> tuple[LogSumExp, LogSumExp]:
    """Of the models of which ``kl_divergence_fwd`` saved it."""
    lse, shift, _, first_origin, second_origin = saved
    of_first, of_second = (origin * (scale * 2) for origin in (first_origin, second_origin))
    near = lse * units.pairs
    # Of equal models both are the same number.
    return LogSumExp(of_first, near), LogSumExp(of_second, near + shift * units.pairs)


def rounded_scale(
    temperature: float, inverse: Tensor | None, dtype: torch.dtype, units: Units
) -> float | Tensor:
    """1 / temperature as kernels round it in arithmetic of the dtype: a number, or [R] or 0-dim."""
    if inverse is not None:
        return (inverse / units.scale).to(dtype).to(torch.float64) * units.scale
    return torch.tensor(1 / temperature / units.scale, dtype=dtype).item() * units.scale
