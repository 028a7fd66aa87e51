"""How log-probs are laid out: padded [B, T], packed [N] with cu_seqlens, or one sequence [N]."""

from __future__ import annotations

import torch
from torch import Tensor


def number_of_sequences(logprobs: Tensor, cu_seqlens: Tensor | None) -> int:
    """S: rows of a padded batch, pieces of a packed one."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1
    return logprobs.shape[0] if logprobs.dim() == 2 else 1


def sequence_of_token(logprobs: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, int]:
    """The sequence that each token belongs to, and how many sequences there are."""
    sequences = number_of_sequences(logprobs, cu_seqlens)
    index = torch.arange(sequences, device=logprobs.device)
    if cu_seqlens is None:
        return index.repeat_interleave(logprobs.shape[-1]), sequences
    lengths = cu_seqlens.diff()
    return index.repeat_interleave(lengths, output_size=logprobs.shape[0]), sequences
