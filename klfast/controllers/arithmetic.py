"""The operations of the rules, over Python floats and over 0-dim fp64 tensors, with the same bits.

A rule is written once, with ``+ - * /``, comparisons, ``&``, ``|`` and the functions of an
``Arithmetic``. IEEE arithmetic gives a sum, a product or a quotient of float64 the same bits on
every device. What it leaves open is fixed here: which operand a minimum returns, and the
exponential, which is that of the host's C library on every device (``exponential``).

Settings are tensors too on a device: CUDA divides by a *number* through its reciprocal, which
rounds twice.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from klfast.controllers.exponential import Exponential
from klfast.dtypes import has_float64, wide_dtype

Number: TypeAlias = Any
"""A Python float on the host, a 0-dim fp64 tensor on a device."""


class Arithmetic(Protocol):
    """The functions that a rule calls beside operators."""

    def where(self, condition: Any, yes: Number, no: Number, /) -> Number:
        """``yes`` where the condition holds, else ``no``."""

    def minimum(self, a: Number, b: Number, /) -> Number:
        """``b`` if ``b < a``, else ``a``."""

    def maximum(self, a: Number, b: Number, /) -> Number:
        """``b`` if ``b > a``, else ``a``."""

    def exp(self, x: Number, /) -> Number:
        """The exponential; inf beyond float64."""


class Floats:
    """Python floats, on the host."""

    def where(self, condition: bool, yes: float, no: float, /) -> float:
        return yes if condition else no

    def minimum(self, a: float, b: float, /) -> float:
        return min(a, b)

    def maximum(self, a: float, b: float, /) -> float:
        return max(a, b)

    def exp(self, x: float, /) -> float:
        try:
            return math.exp(x)
        except OverflowError:
            return math.inf


class Tensors:
    """0-dim tensors on one device, without a branch on their values.

    In fp64 they have the bits of the host. A device without fp64 has fp32.
    """

    def __init__(self, device: torch.device) -> None:
        self._exp = Exponential(device) if has_float64(device) else torch.exp

    def where(self, condition: Tensor, yes: Number, no: Number, /) -> Tensor:
        if not isinstance(yes, Tensor) and not isinstance(no, Tensor):
            yes = torch.full_like(condition, yes, dtype=wide_dtype(condition.device))
        return torch.where(condition, yes, no)

    def minimum(self, a: Tensor, b: Number, /) -> Tensor:
        return torch.where(b < a, b, a)

    def maximum(self, a: Tensor, b: Number, /) -> Tensor:
        return torch.where(b > a, b, a)

    def exp(self, x: Tensor, /) -> Tensor:
        return self._exp(x)
