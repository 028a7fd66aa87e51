"""The checks of a caller's loss per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import check_device, check_tensor, reduction_of, shape_text
from klfast.types.dtypes import MASKS
from klfast.types.reduction import REDUCTIONS


class Loss(NamedTuple):
    """A caller's loss per token, a function of log-probs [n] and of the same tokens of each input,
    that returns [n].
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    """[R] each, without a graph."""
    is_autocast: bool
    """Whether the caller has autocast on."""

    @classmethod
    def of(cls, function: Any, inputs: Any, token_ids: Tensor) -> Loss:
        """The checked loss, with inputs of one number for each token."""
        if not callable(function):
            raise TypeError(
                "loss must be a function of log-probs [n] and of the tensors in inputs, got "
                f"{type(function).__name__}"
            )
        if not isinstance(inputs, tuple | list):
            raise TypeError(
                f"inputs must be a tuple or list of tensors, got {type(inputs).__name__}"
                + (": pass inputs=(tensor,)" if isinstance(inputs, Tensor) else "")
            )
        rows = [_input_of(f"inputs[{at}]", value, token_ids) for at, value in enumerate(inputs)]
        is_autocast = not token_ids.is_meta and torch.is_autocast_enabled(token_ids.device.type)
        return cls(function, tuple(rows), is_autocast)


def check_scalar(reduction: str, *, is_normalized: bool) -> None:
    """Raise unless a reduction of losses has a scalar result."""
    if not reduction_of(reduction, is_normalized=is_normalized).is_scalar():
        scalars = ", ".join(repr(name) for name, of in REDUCTIONS.items() if of.is_scalar())
        raise ValueError(
            f"reduction must be one of {scalars}, got {reduction!r}: for another result, "
            "apply the loss to the log-probs of klfast.linear_token_logprobs"
        )


def _input_of(name: str, given: Any, token_ids: Tensor) -> Tensor:
    """A checked input, [R]."""
    value = check_tensor(name, given, MASKS)
    if value.requires_grad:
        raise ValueError(
            f"{name} must be a constant, got a tensor that requires a gradient: pass "
            f"{name}.detach(), or apply the loss to the log-probs of klfast.linear_token_logprobs"
        )
    shape = token_ids.shape
    fits = [own in (1, of) for own, of in zip(value.shape[::-1], shape[::-1], strict=False)]
    if value.dim() > len(shape) or not all(fits):
        raise ValueError(
            f"{name} must have the shape of token_ids, {list(shape)}, or broadcast to it, got "
            f"{shape_text(value)}"
        )
    check_device(name, value, token_ids, "token_ids")
    return value.expand(shape).reshape(-1)
