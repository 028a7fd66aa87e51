"""How log-probs are laid out: padded [B, T], packed [N] with cu_seqlens, or one sequence [N]."""

from __future__ import annotations

from torch import Tensor


def number_of_sequences(logprobs: Tensor, cu_seqlens: Tensor | None) -> int:
    """S: rows of a padded batch, pieces of a packed one."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1
    return logprobs.shape[0] if logprobs.dim() == 2 else 1
