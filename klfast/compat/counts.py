"""Counts by which the frameworks' losses divide, checked under the frameworks' names for them."""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.checks.arguments import check_number
from klfast.checks.values import are_tracing, checks_requested, holds_values


def positive_count(argument: str, count: float | Tensor) -> float | Tensor:
    """The count, > 0.

    Raises:
        TypeError, ValueError: it is not; of a GPU's tensor the value is not read, as that needs a
            sync, unless ``KLFAST_CHECK=1`` asks for it.
    """
    if not isinstance(count, Tensor):
        return _number(argument, count, above=0)
    if _value_is_checked(argument, count):
        check_number(argument, count.item(), above=0)
    return count


def count_of_tokens(argument: str, count: float | Tensor) -> float | Tensor:
    """The count, >= 0, with 1 for 0: no token exists then, and the sum that it divides is 0.

    Raises:
        TypeError, ValueError: as :func:`positive_count`.
    """
    if not isinstance(count, Tensor):
        return _number(argument, count, least=0) or 1.0
    if _value_is_checked(argument, count):
        check_number(argument, count.item(), least=0)
    return torch.where(count == 0, 1, count)


def _number(
    argument: str, count: float, *, above: float | None = None, least: float | None = None
) -> float:
    """A number that is checked, or under torch.compile, where it may be symbolic, as it is."""
    if torch.compiler.is_compiling() and type(count) in (int, float):
        return count
    return check_number(argument, count, above=above, least=least)


def _value_is_checked(argument: str, count: Tensor) -> bool:
    """Check the shape of a tensor; return whether its value may be read and is checked."""
    if count.dim() != 0:
        raise ValueError(
            f"{argument} must be a number or a 0-dim tensor, got a tensor of shape "
            f"{list(count.shape)}"
        )
    return holds_values(count) or (checks_requested() and not are_tracing())
