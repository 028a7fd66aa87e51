"""Checks of what tensors hold: the weights of a mask, the contents of cu_seqlens, 0-dim scalars.

On a CPU the native kernel refuses bad values in its own read, and these functions say what was
wrong; the eager backend calls them before it computes. On a GPU they need a sync and run under
``KLFAST_CHECK=1`` alone. Nothing is checked by value while tracing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klfast.checks.arguments import check_number
from klfast.dtypes import arithmetic_dtype

if TYPE_CHECKING:
    from klfast.call import KLCall
    from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall


def are_tracing() -> bool:
    """Whether tensors may be without data: under torch.compile or a torch.func transform."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def checks_requested() -> bool:
    """Whether ``KLFAST_CHECK=1`` asks for the checks that need a device sync."""
    return os.environ.get("KLFAST_CHECK") == "1"


def holds_values(tensor: Tensor) -> bool:
    """Whether a CPU's tensor can be read here: a plain one, where nothing is traced."""
    return (
        not are_tracing()
        and not torch._C._is_tracing()
        and type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and torch._C._len_torch_dispatch_stack() == 0
    )


def check_values(call: KLCall) -> None:
    """Raise ValueError if a mask, cu_seqlens, coef or normalizer holds what it must not."""
    tensors = call.tensors
    if tensors.mask is not None and tensors.mask.dtype != torch.bool:
        _check_mask_values(tensors.mask.to(arithmetic_dtype(*tensors[:3])))
    if tensors.cu_seqlens is not None:
        _check_cu_seqlens_values(tensors.cu_seqlens, tensors.logprobs.shape[0])
    check_coef(call, call.coef if tensors.coef is None else tensors.coef.item())
    if tensors.normalizer is not None:
        check_number("normalizer", tensors.normalizer.item(), above=0)


def check_token_logprobs_values(call: TokenLogprobsCall) -> None:
    """Raise ValueError for a bad weight in the mask, or if a kept token's id is no word."""
    check_keeping_mask(call)
    check_token_ids(call.token_ids, call.keep, call.logits.shape[-1])


def check_keeping_mask(call: TokenLogprobsCall) -> None:
    """Raise ValueError if a mask, of which ``keep`` was made, holds what a mask must not."""
    mask = call.mask
    if mask is None or mask.dtype in (torch.bool, torch.uint8) or not mask.numel():
        return
    dtype = arithmetic_dtype(call.logits)
    least, most = (bound.item() for bound in mask.aminmax())
    if not (least >= 0 and most <= torch.finfo(dtype).max):  # NaN is neither
        _check_mask_values(mask.to(dtype))


def check_divergence_values(call: KLDivergenceCall) -> None:
    """Raise ValueError for what :func:`check_values` refuses, and for ids that are no words."""
    check_values(call.tokens)
    if call.token_ids is not None:
        check_token_ids(call.token_ids, call.keep, call.logits.shape[-1])


def check_coef(call: KLCall, coef: float) -> None:
    """Raise ValueError unless the coefficient is finite in the arithmetic's dtype."""
    dtype = arithmetic_dtype(*call.tensors[:3])
    name = "coef" if call.scores is None else "kl_coef"
    if abs(check_number(name, coef)) > torch.finfo(dtype).max:
        raise ValueError(f"{name} must be finite in the arithmetic's dtype, {dtype}, got {coef!r}")


def check_token_ids(token_ids: Tensor, keep: Tensor | None, vocabulary: int) -> None:
    """Raise ValueError unless the ids of kept tokens are words of the vocabulary."""
    bad = (token_ids < 0) | (token_ids >= vocabulary)
    if keep is not None:
        bad = bad & keep
    if bad.any():
        where = int(bad.nonzero()[0].item())
        raise ValueError(
            f"token_ids must be in [0, {vocabulary}) where tokens are kept, got "
            f"{token_ids[where].item()} at token {where}"
        )


def _check_mask_values(mask: Tensor) -> None:
    bad = ~((mask >= 0) & (mask < torch.inf))
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"mask must hold finite weights >= 0, got {mask[where].item()} at {list(where)}"
        )


def _check_cu_seqlens_values(cu_seqlens: Tensor, tokens: int) -> None:
    first, last = cu_seqlens[0].item(), cu_seqlens[-1].item()
    if first != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {first}")
    decreasing = cu_seqlens.diff() < 0
    if decreasing.any():
        at = int(decreasing.nonzero()[0].item()) + 1
        pair = cu_seqlens[at - 1 : at + 1].tolist()
        raise ValueError(f"cu_seqlens must not decrease, got {pair[1]} after {pair[0]} at [{at}]")
    if last != tokens:
        raise ValueError(
            f"cu_seqlens must end at the number of tokens in logprobs, {tokens}, got {last}"
        )
