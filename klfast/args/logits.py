"""Checks of the arguments over logits that need no data, and the rows made from them.

Shapes: rows are [A, T, V], any strides; R = A * T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.args.checks import (
    check_device,
    check_number,
    check_tensor,
    shape_text,
)
from klfast.types.dtypes import FLOATS, INTEGERS, wide, wide_dtype
from klfast.types.names import ReturnEntropy

_TOKENS_OF = {"logits": "logits without the vocabulary", "hidden": "hidden without the hidden size"}
"""The tokens' shape in error messages, by the argument that has it."""
NO_ID = -(2**63)
"""Marks a missing token id. ``kNoId`` in ``csrc/logits/call.h``."""

LEAST_SKEW = 1e-30
"""The least ``skew_alpha`` above 0: ``kLeastSkew`` in ``csrc/formulas/divergences.h``."""

Temperature = float | Tensor
"""A number, or a tensor that is 0-dim or has the first dimensions of the tokens' shape."""


def wants_entropy(return_entropy: ReturnEntropy) -> ReturnEntropy:
    if isinstance(return_entropy, str) and return_entropy != "detached":
        raise ValueError(
            f"return_entropy must be True, False or 'detached', got {return_entropy!r}"
        )
    return "detached" if isinstance(return_entropy, str) else bool(return_entropy)


def jsd_beta_of(jsd_beta: float) -> float:
    if torch.compiler.is_compiling() and not isinstance(jsd_beta, bool):
        return jsd_beta  # may be symbolic
    number = check_number("jsd_beta", jsd_beta)
    if not 0 < number < 1:
        raise ValueError(
            f"jsd_beta must be a number between 0 and 1, got {jsd_beta!r}: 0 is "
            "direction='forward', and 1 is direction='reverse'"
        )
    return number


def skew_alpha_of(skew_alpha: float) -> float:
    if torch.compiler.is_compiling() and not isinstance(skew_alpha, bool):
        return skew_alpha
    number = check_number("skew_alpha", skew_alpha)
    if not (number == 0 or LEAST_SKEW <= number < 1):
        raise ValueError(
            f"skew_alpha must be 0 or a number from {LEAST_SKEW} to below 1, got {skew_alpha!r}: "
            "0 is the KL itself, and at 1 the mixture is the first model"
        )
    return number


def temperature_of(
    temperature: Temperature, rows: Tensor, keep: Tensor | None, of: str = "logits"
) -> tuple[float, Tensor | None]:
    """A checked temperature: (number, None) for a number, (1, inverse) for a tensor or a symbol of
    torch.compile. A row that is not in ``keep`` has an inverse of 1.
    """
    if isinstance(temperature, Tensor):
        inverse = _inverse_of(temperature, rows, of)
        if keep is not None and inverse.dim() > 0:
            inverse = torch.where(keep, inverse, 1.0)
        return 1.0, inverse
    if torch.compiler.is_compiling() and type(temperature) in (int, float):
        # May be symbolic. As a tensor it stays so, and a new value needs no new compilation.
        one = torch.ones((), dtype=wide_dtype(rows.device), device=rows.device)
        return 1.0, one / temperature
    number = check_number("temperature", temperature, above=0)
    if not torch.finfo(torch.float32).tiny < 1 / number < torch.finfo(torch.float32).max:
        raise ValueError(f"temperature must have a reciprocal within fp32, got {temperature!r}")
    return number, None


def _inverse_of(temperature: Tensor, rows: Tensor, of: str) -> Tensor:
    """1 / temperature, in ``wide_dtype``: 0-dim, or one per row, [R]."""
    check_tensor("temperature", temperature, (*INTEGERS, *FLOATS))
    check_device("temperature", temperature, rows, of)
    tokens = rows.shape[:-1]
    fits = [own in (1, of) for own, of in zip(temperature.shape, tokens, strict=False)]
    if temperature.dim() > len(tokens) or not all(fits):
        raise ValueError(
            "temperature must be a number, a 0-dim tensor, or have the first dimensions of "
            f"{_TOKENS_OF[of]}, {list(tokens)}, or 1 in their place, got {shape_text(temperature)}"
        )
    inverse = wide(temperature.detach()).reciprocal()
    if inverse.dim() == 0:
        return inverse
    missing = (1,) * (len(tokens) - inverse.dim())
    return inverse.reshape(*inverse.shape, *missing).expand(tokens).reshape(-1).contiguous()


def rows_of(logits: Tensor) -> Tensor:
    """[..., V] as [A, T, V]: a view wherever strides allow one."""
    if logits.dim() > 3:
        return logits.flatten(0, -3)
    return logits.reshape((1,) * (3 - logits.dim()) + tuple(logits.shape))


def of_k(values: Tensor) -> Tensor:
    """[R] or [R, K] as [R, K]."""
    return values if values.dim() == 2 else values[:, None]


def picked(
    token_ids: Tensor, logits: Tensor, ignore_index: int | None
) -> tuple[Tensor, Tensor | None]:
    """The ids, [R] or [R, K], and the rows that have one, [R]; None for all."""
    token_ids = token_ids.detach().to(torch.int64)  # uint8 cannot hold -100
    exist = None if ignore_index is None else token_ids != ignore_index
    if token_ids.dim() < logits.dim():
        return token_ids.reshape(-1).contiguous(), None if exist is None else exist.reshape(-1)
    ids = ids_of_k(token_ids, exist)
    return ids, None if exist is None else exist.reshape(ids.shape).any(-1)


def ids_of_k(token_ids: Tensor, exist: Tensor | None) -> Tensor:
    """Ids [..., K] as [R, K], int64; ``NO_ID`` where none exists. A wrong id that equals ``NO_ID``
    becomes another wrong id.
    """
    ids = token_ids.detach().to(torch.int64).clamp(min=NO_ID + 1)
    if exist is not None:
        ids = torch.where(exist, ids, NO_ID)
    # Not reshape: the number of rows is an int to torch.Size, and a constant to torch.export.
    return (ids if ids.dim() > 1 else ids[None]).flatten(0, -2).contiguous()


def kept(mask: Tensor | None, exist: Tensor | None = None) -> Tensor | None:
    """The rows that are read, [R] bool; None for all."""
    keep = None if mask is None else _as_bool(mask).reshape(-1).contiguous()
    if keep is None or exist is None:
        return exist if keep is None else keep
    return keep & exist


def _as_bool(mask: Tensor) -> Tensor:
    """True where a mask is not 0; a boolean mask is returned as it is. An inference tensor is
    copied, as autograd cannot save it. torch.compile has no inference tensors.
    """
    is_saved = mask.dtype == torch.bool and (
        torch.compiler.is_compiling() or not mask.is_inference()
    )
    return mask if is_saved else mask != 0
