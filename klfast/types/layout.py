"""How log-probs are laid out: padded [B, T], packed [N] with cu_seqlens, or one sequence [N]."""

from __future__ import annotations

import torch
from torch import Tensor


def number_of_sequences(logprobs: Tensor, cu_seqlens: Tensor | None) -> int:
    """S: rows of a padded batch, pieces of a packed one."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1
    return logprobs.shape[0] if logprobs.dim() == 2 else 1


def sequence_of_tokens(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[tokens]: the sequence of each, S for a token outside of all sequences."""
    index = torch.arange(number_of_sequences(tokens, cu_seqlens), device=tokens.device)
    if cu_seqlens is None:
        return index.repeat_interleave(tokens.shape[-1])
    # cu_seqlens is not checked on a GPU. If it is wrong, repeat_interleave would write out of
    # bounds.
    position = torch.arange(tokens.numel(), device=tokens.device, dtype=cu_seqlens.dtype)
    starts_before = torch.searchsorted(cu_seqlens.contiguous(), position, right=True)
    return (starts_before - 1) % (index.shape[0] + 1)


def per_token(numbers: Tensor, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Numbers in the shape of ``tokens``, from this shape or [S, 1]. Padded ones are not copied."""
    if numbers.shape == tokens.shape:
        return numbers
    if cu_seqlens is None:
        return (numbers if tokens.dim() == 2 else numbers[0]).expand(tokens.shape)
    with_outside = torch.nn.functional.pad(numbers.squeeze(-1), (0, 1))
    return with_outside[sequence_of_tokens(tokens, cu_seqlens)]
