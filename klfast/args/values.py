"""Checks of the contents of tensors: the weights of a mask, cu_seqlens, 0-dim scalars.

``are_checked`` decides whether values are checked. The native kernels refuse bad values on a CPU in
their own read, and these functions say afterwards which value was bad.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from klfast.args.checks import CUMULATE, check_number
from klfast.formulas.sequences import per_token
from klfast.types.device import is_capturing

# The id of a token that is left out, as in torch's and flash-attn's cross-entropy.
IGNORED = -100


def are_tracing() -> bool:
    """True if tensors may have no data: under torch.compile or a torch.func transform."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def checks_requested() -> bool:
    """True if ``KLFAST_CHECK=1`` asks for the checks that need a device sync."""
    return os.environ.get("KLFAST_CHECK") == "1"


def holds_values(tensor: Tensor) -> bool:
    """True if a CPU tensor can be read here: a plain tensor, while nothing traces."""
    return not are_tracing() and tensor.device.type == "cpu" and _is_plain(tensor)


def can_be_read(tensor: Tensor) -> bool:
    """True if a tensor's values are checked (``are_checked``), and can be read here."""
    return are_checked(tensor.device) and _is_plain(tensor)


def _is_plain(tensor: Tensor) -> bool:
    # A subclass, a tracer or a dispatch mode, such as fake tensors, may have given it no data.
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._is_functional_tensor(tensor)
    )


def are_checked(device: torch.device) -> bool:
    """True if values are checked on a device: on a CPU, or under ``KLFAST_CHECK=1``."""
    # Traced and meta tensors hold no values, and the capture of a graph allows no sync.
    if device.type == "meta" or are_tracing():
        return False
    return device.type == "cpu" or (checks_requested() and not is_capturing(device))


def check_keeping_mask(mask: Tensor, arithmetic: torch.dtype) -> None:
    """Raise ValueError for an invalid value of a mask that no reduction checks."""
    if not can_be_read(mask):
        return
    if mask.dtype in (torch.bool, torch.uint8) or not mask.numel():
        return
    least, most = (bound.item() for bound in mask.aminmax())
    if not (least >= 0 and most <= torch.finfo(arithmetic).max):  # NaN is neither
        check_mask_values(mask, arithmetic)


def check_coef(argument: str, coef: float | Tensor, arithmetic: torch.dtype) -> None:
    """Raise ValueError unless a coefficient is finite in the arithmetic's dtype."""
    number = coef.item() if isinstance(coef, Tensor) else coef
    if type(number) is float and abs(number) <= 1e30:  # most
        return
    if abs(check_number(argument, number)) > torch.finfo(arithmetic).max:
        raise ValueError(
            f"{argument} must be finite in {arithmetic}, the dtype of the result, got {number!r}"
        )


def check_token_ids(
    token_ids: Tensor,
    keep: Tensor | None,
    vocabulary: int,
    *,
    none: int | None = None,
    argument: str = "token_ids",
    may_be_shard: bool = False,
) -> None:
    """Raise ValueError unless the ids of kept tokens are in the vocabulary, or ``none``.

    Ids are [R] or [R, K], ``keep`` [R]. ``may_be_shard``: ``group=`` may have been forgotten.
    """
    bad = (token_ids < 0) | (token_ids >= vocabulary)
    if none is not None:
        bad = bad & (token_ids != none)
    if keep is not None:
        bad = bad & (keep if token_ids.dim() == 1 else keep[:, None])
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        got = token_ids[where].item()
        remedy = ": it marks a token that is left out, so mask it" if got == IGNORED else ""
        if may_be_shard and got >= vocabulary:
            remedy = ": with tensor parallelism, pass group= for a shard of the vocabulary"
        raise ValueError(
            f"{argument} must be in [0, {vocabulary}) where tokens are kept, got {got} at "
            f"{place_text(where)}{remedy}"
        )


def check_distinct(argument: str, ids: Tensor, keep: Tensor | None, *, none: int) -> None:
    """Raise ValueError if a token in ``keep`` [R] has an id [R, K] twice; ``none`` is no id."""
    ordered, places = ids.sort(dim=-1, stable=True)
    bad = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != none)
    if keep is not None:
        bad = bad & keep[:, None]
    if bad.any():
        token, second = bad.nonzero()[0].tolist()
        entries = places[token, second : second + 2].tolist()
        raise ValueError(
            f"{argument} must be distinct within a token, got {ordered[token, second].item()} in "
            f"entries {entries[0]} and {entries[1]} of token {token}"
        )


def place_text(where: tuple[int, ...]) -> str:
    """The text for a position among tokens, or among K entries per token."""
    return f"token {where[0]}" + "".join(f", entry {entry}" for entry in where[1:])


def check_temperatures(inverse: Tensor) -> None:
    """Raise ValueError unless 1 / temperature, [R] or 0-dim, is > 0, and within fp32."""
    finite = torch.finfo(torch.float32)
    bad = ~((inverse > finite.tiny) & (inverse < finite.max))
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        got = 1 / inverse[where].item() if inverse[where] != 0 else float("inf")
        place = f" at {place_text(where)}" if where else ""
        raise ValueError(
            f"temperature must be > 0 with a reciprocal within fp32, got {got:.6g}{place}"
        )


def check_mask_values(mask: Tensor, arithmetic: torch.dtype) -> None:
    """Raise ValueError unless weights are finite in the arithmetic's dtype, and not negative."""
    if mask.dtype == torch.bool:
        return
    mask = mask.to(arithmetic)
    bad = ~((mask >= 0) & (mask < torch.inf))
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"mask must hold finite weights >= 0, got {mask[where].item()} at {list(where)}"
        )


def check_weights_values(
    weights: Tensor, mask: Tensor | None, tokens: Tensor, cu_seqlens: Tensor | None
) -> None:
    """Raise ValueError if a kept token has a negative weight.

    ``weights`` have the shape of ``tokens``, or are [S, 1]. ``cu_seqlens`` has been checked.
    """
    weights = per_token(weights, tokens, cu_seqlens)
    bad = weights < 0 if mask is None else (weights < 0) & (mask != 0)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"weights must be >= 0 where tokens are kept, got {weights[where].item()} at "
            f"{list(where)}"
        )


def check_cu_seqlens_values(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise ValueError unless cu_seqlens rises from 0 to the number of tokens."""
    first, last = cu_seqlens[0].item(), cu_seqlens[-1].item()
    text = ""
    if first != 0:
        text = f"start at 0, got {first}"
    elif (decreasing := cu_seqlens.diff() < 0).any():
        at = int(decreasing.nonzero()[0].item()) + 1
        pair = cu_seqlens[at - 1 : at + 1].tolist()
        text = f"not decrease, got {pair[1]} after {pair[0]} at [{at}]"
    elif last != tokens:
        text = f"end at the number of packed tokens, {tokens}, got {last}"
    if text:
        numbers = cu_seqlens.tolist()
        are_lengths = sum(numbers) == tokens and min(numbers) >= 0
        raise ValueError(f"cu_seqlens must {text}{f': {CUMULATE}' if are_lengths else ''}")
