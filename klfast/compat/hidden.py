"""Shared by the frameworks' functions from hidden states [..., D]."""

from __future__ import annotations

from torch import Tensor


def check_words(argument: str, words: Tensor, of: str, hidden: Tensor) -> None:
    """A word for each token."""
    if words.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{argument} must have the shape of {of} without its width, {list(hidden.shape[:-1])}, "
            f"a word of each token, got {list(words.shape)}"
        )
