"""The validated arguments of a call over logits, as they travel to a backend.

Shapes: rows are [A, T, V], any strides; R = A * T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.call import KLCall

DIRECTIONS = ("reverse", "forward", "jsd")
DIVERGENCES = ("kl", "jsd")
"""What the ops compute of two models, in the order of ``Divergence`` in ``csrc/logits/call.h``."""


class TokenLogprobsCall(NamedTuple):
    """Arguments of ``token_logprobs`` after every check."""

    logits: Tensor
    """[A, T, V]; the only one with a graph."""
    token_ids: Tensor
    """[R], int64, contiguous."""
    keep: Tensor | None
    """[R], bool, contiguous: which rows are read."""
    temperature: float
    inverse_temperature: Tensor | None
    """0-dim float64, in place of the temperature where torch.compile holds that as a symbol."""
    return_entropy: bool
    inplace_backward: bool
    shape: torch.Size
    """Of the results."""
    mask: Tensor | None
    """As given: for the check of its values alone."""


class KLDivergenceCall(NamedTuple):
    """Arguments of ``kl_divergence`` after every check."""

    logits: Tensor
    """[A, T, V], like ``ref_logits``; both may carry a graph."""
    ref_logits: Tensor
    token_ids: Tensor | None
    """[R], int64, contiguous."""
    keep: Tensor | None
    """[R], bool, contiguous: which rows are read."""
    direction: str
    jsd_beta: float
    temperature: float
    inverse_temperature: Tensor | None
    """0-dim float64, in place of the temperature where torch.compile holds that as a symbol."""
    tokens: KLCall
    """What is made of the rows' divergences: k1 of them against zeros. Its log-probs are zeros."""

    def reduce(self, rows: Tensor) -> KLCall:
        """The call over log-probs that reduces [R] divergences."""
        tensors = self.tokens.tensors
        return self.tokens._replace(tensors=tensors._replace(logprobs=rows.view(self.shape)))

    def compare_tokens(self, logprobs: Tensor, ref_logprobs: Tensor) -> KLCall:
        """The call over log-probs of the taken tokens, for its statistics alone."""
        tensors = self.tokens.tensors._replace(
            logprobs=logprobs.detach(), ref_logprobs=ref_logprobs.detach()
        )
        return self.tokens._replace(tensors=tensors)

    @property
    def shape(self) -> torch.Size:
        """Of what is per token."""
        return self.tokens.tensors.logprobs.shape
