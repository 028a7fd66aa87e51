"""Counts by which the frameworks' losses divide, checked under the frameworks' names for them."""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.checks.arguments import check_number
from klfast.checks.values import are_tracing, checks_requested, holds_values


def positive_count(argument: str, count: float | Tensor) -> float | Tensor:
    """The count, > 0.

    Raises:
        TypeError, ValueError: it is not. The value of a GPU's tensor is not read, because that
            needs a sync, unless ``KLFAST_CHECK=1`` asks for it.
    """
    if not isinstance(count, Tensor):
        is_symbolic = torch.compiler.is_compiling() and type(count) in (int, float)
        return count if is_symbolic else check_number(argument, count, above=0)
    if count.dim() != 0:
        raise ValueError(
            f"{argument} must be a number or a 0-dim tensor, got a tensor of shape "
            f"{list(count.shape)}"
        )
    if holds_values(count) or (checks_requested() and not are_tracing()):
        check_number(argument, count.item(), above=0)
    return count
