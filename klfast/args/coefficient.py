"""The coefficient of a penalty, as callers give it: a number, a 0-dim tensor, or a controller."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from torch import Tensor

from klfast.args.checks import scalar_argument


class HasValue(Protocol):
    """A controller: its ``value`` is the coefficient."""

    @property
    def value(self) -> Any:
        """A number or a 0-dim tensor."""


Coefficient: TypeAlias = float | Tensor | HasValue


def value_of(coef: Coefficient) -> Any:
    """The number or tensor that a coefficient is now: of a controller its ``value``."""
    return coef if isinstance(coef, (float, int, Tensor)) else getattr(coef, "value", coef)


def coef_argument(
    argument: str, coef: Coefficient, like: Tensor, *, of: str = "logprobs"
) -> float | Tensor:
    """A checked coefficient as a number, or a 0-dim tensor where ``like`` is, without a graph."""
    return scalar_argument(argument, value_of(coef), like, of=of)
