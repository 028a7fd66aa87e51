"""The signature table: for each public function a row for each tensor, and the check of a call.

A shape is written in letters: B sequences of T tokens, or N packed tokens; S sequences (B, or
``len(cu_seqlens) - 1``). ``"B T"`` stands for [B, T], for packed [N] with ``cu_seqlens``, and for
[N], which is one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import check_cu_seqlens, check_device, check_tensor, shape_text
from klfast.types.dtypes import FLOATS, MASKS
from klfast.types.layout import number_of_sequences


class Argument(NamedTuple):
    """A tensor that a function takes."""

    name: str
    shape: str
    """A key of ``_SHAPES``."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    is_optional: bool = False
    """Whether None may be given."""


_MASK = Argument("mask", "B T", MASKS, is_optional=True)
_LOGPROBS = Argument("logprobs", "B T")
_REF_LOGPROBS = Argument("ref_logprobs", "B T")

SIGNATURES: dict[str, tuple[Argument, ...]] = {
    "kl_penalty": (
        _LOGPROBS,
        _REF_LOGPROBS,
        Argument("old_logprobs", "B T", is_optional=True),
        _MASK,
    ),
    "kl_rewards": (_LOGPROBS, _REF_LOGPROBS, _MASK, Argument("scores", "S", MASKS)),
    "reduce": (Argument("values", "B T"), _MASK),
    "data_parallel_normalizer": (_MASK._replace(is_optional=False),),
    "rollout_correction": (
        _LOGPROBS,
        Argument("rollout_logprobs", "B T"),
        _MASK,
        Argument("advantages", "B T or S", is_optional=True),
    ),
}
"""The rows of each function. The first has the shape and the device of the call. Every function has
``cu_seqlens`` [S+1] too."""


def check(function: str, cu_seqlens: Tensor | None, tokens: Tensor, *others: object) -> None:
    """Raise TypeError or ValueError unless each tensor is what its row says.

    Args:
        function: the name of a public function.
        cu_seqlens: the boundaries of packed sequences.
        tokens: the argument of the first row.
        others: the arguments of the other rows.
    """
    first, *rows = SIGNATURES[function]
    check_tensor(first.name, tokens, first.dtypes)
    if cu_seqlens is None:
        if tokens.dim() not in (1, 2):
            raise ValueError(
                f"{first.name} must have shape [B, T] or [N], got {shape_text(tokens)}"
            )
    elif tokens.dim() != 1:
        raise ValueError(
            f"{first.name} must be packed, of shape [N], with cu_seqlens, got {shape_text(tokens)}"
        )
    else:
        check_cu_seqlens(cu_seqlens, tokens, of=first.name)
    shape, device = tokens.shape, tokens.device
    for (name, letters, dtypes, is_optional), value in zip(rows, others, strict=True):
        if value is None and is_optional:
            continue
        tensor = check_tensor(name, value, dtypes)
        if letters != "B T" or tensor.shape != shape:
            wanted = _SHAPES[letters](tensor, tokens, first.name, cu_seqlens)
            if wanted is not None:
                raise ValueError(f"{name} must have {wanted}, got {shape_text(tensor)}")
        if tensor.device != device:
            check_device(name, tensor, tokens, first.name)


def _per_token(value: Tensor, tokens: Tensor, of: str, _: Tensor | None) -> str | None:
    return None if value.shape == tokens.shape else f"the shape of {of}, {shape_text(tokens)}"


def _per_sequence(value: Tensor, tokens: Tensor, _: str, cu_seqlens: Tensor | None) -> str | None:
    sequences = number_of_sequences(tokens, cu_seqlens)
    return None if value.shape == (sequences,) else f"shape [{sequences}], one per sequence"


def _per_token_or_sequence(
    value: Tensor, tokens: Tensor, of: str, cu_seqlens: Tensor | None
) -> str | None:
    per_token = _per_token(value, tokens, of, cu_seqlens)
    per_sequence = _per_sequence(value, tokens, of, cu_seqlens)
    return (
        None
        if per_token is None or per_sequence is None
        else f"{per_token}, or {per_sequence.removeprefix('shape ')}"
    )


_SHAPES: dict[str, Callable[[Tensor, Tensor, str, Tensor | None], str | None]] = {
    "B T": _per_token,
    "S": _per_sequence,
    "B T or S": _per_token_or_sequence,
}
"""What a tensor's shape must be, in words; None where it is that."""
