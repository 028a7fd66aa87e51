"""Under a frozen head, the gradients of a token's numbers to its hidden states, as vectors.

Shapes: R tokens of width D, of which a chunk has n, with K ids a token or one; V words.

A log-prob's gradient is the sum over words of (own - p_v) W_v. The forward leaves the sum of
-p_v W_v over the words that are no ids of the token. The backward adds those that are, with the
factor g - G p, which keeps its digits where p is nearly 1: g is what flows to a log-prob, G the sum
of these over a token's ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.linear.call import LinearCall
from klfast.linear.models import ChunkOfModel, slope_of
from klfast.linear.products import to_hidden
from klfast.linear.rows import RowOps, Rows, Tokens
from klfast.logits.arguments import NO_ID, of_k


class Vectors:
    """The gradients of one model's numbers to its hidden states, [R, D] each.

    Args:
        call: what is asked.
        model: its place in ``call.models()``.
        rows: where the call's numbers are stored.
    """

    def __init__(self, call: LinearCall, model: int, rows: Rows) -> None:
        self._ids, self._keep, self._rows = call.token_ids, call.keep, call.shape.numel()
        self._own_ids = self._ids
        """As words of this rank's shard, where it has one; ``NO_ID`` for those of others."""
        if call.shards is not None and self._ids is not None:
            self._own_ids = call.shards.own_ids(self._ids, NO_ID)
        tokens, hidden = rows.tokens[model], call.models()[model].hidden

        def vectors(wanted: bool) -> Tensor | None:
            return hidden.new_zeros(hidden.shape, dtype=call.arithmetic()) if wanted else None

        has_ids = tokens is not None and call.token_ids is not None
        self._of_kl = vectors(rows.kl is not None)
        self._of_entropy = vectors(tokens is not None and tokens.entropy.numel() > 0)
        self._of_others = vectors(has_ids)
        self._slopes = torch.zeros_like(tokens.logprobs) if tokens is not None and has_ids else None
        """[R] or [R, K]: d logit / d z at the ids, of the scaled logits and those z before the
        softcap."""

    def add_divergences(self, model: ChunkOfModel, grad: Tensor) -> None:
        """Store those of a chunk's divergences, of their gradients to the logits, [1, n, V]."""
        if self._of_kl is not None:
            _store(self._of_kl, model, grad)

    def add_tokens(self, kernels: RowOps, model: ChunkOfModel, tokens: Tokens) -> None:
        """Store those of a chunk's log-probs and entropies."""
        chunk = model.chunk
        if self._of_entropy is not None:
            ones = tokens.entropy.new_ones(chunk.tokens)
            grad = kernels.token_gradient(model, tokens, None, ones, in_place=False)
            _store(self._of_entropy, model, grad)
        if self._of_others is None or self._slopes is None:
            return
        ids = kernels.ids(chunk)
        exist = ids != NO_ID
        shares = exist.to(tokens.logprobs.dtype)
        if ids.dim() == 2:
            shares /= exist.sum(-1, keepdim=True).clamp_(min=1)
        grad = kernels.token_gradient(model, tokens, shares, None, in_place=False)
        own_ids = kernels.own_ids(chunk, NO_ID)
        words = _columns(own_ids, model.logits().shape[-1])
        if words.numel() > 0:
            has_word = (of_k(own_ids) != NO_ID).any(-1, keepdim=True)
            grad[0].scatter_(-1, words, torch.where(has_word, 0, grad[0].gather(-1, words)))
        _store(self._of_others, model, grad)
        slopes = torch.ones_like(shares).mul_(kernels.scale(chunk))
        if words.numel() > 0 and (cap := model.head.softcap) is not None:
            slopes *= slope_of(model.logits()[0].gather(-1, words), cap).view(ids.shape)
        chunk.put_rows(self._slopes, slopes)

    def gradient(
        self,
        weight: Tensor,
        logprobs: Tensor | None,
        grad_kl: Tensor | None,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """[R, D]: of the hidden states, of the gradients of the numbers, [R] or [R, K].

        Args:
            weight: of the head, [V, D].
            logprobs: of the model's tokens, [R] or [R, K].
            grad_kl: what flows to the divergences; None for nothing, like the next two.
            grad_logprobs: what flows to the log-probs.
            grad_entropy: what flows to the entropies.
        """
        own = next(v for v in (self._of_kl, self._of_entropy, self._of_others) if v is not None)
        total = torch.zeros_like(own)
        for vectors, grad in ((self._of_kl, grad_kl), (self._of_entropy, grad_entropy)):
            if vectors is not None and grad is not None:
                total.addcmul_(self._kept(grad)[:, None], vectors)
        if self._of_others is None or grad_logprobs is None or logprobs is None:
            return total
        assert self._ids is not None
        assert self._own_ids is not None
        assert self._slopes is not None
        grads = of_k(self._kept(grad_logprobs)).double()
        grads = torch.where(of_k(self._ids) == NO_ID, 0.0, grads)
        of_all = grads.sum(-1, keepdim=True)
        total.addcmul_(of_all.to(total.dtype), self._of_others)
        if weight.shape[0] == 0:
            return total
        ids, slopes = of_k(self._own_ids), of_k(self._slopes)
        probs = of_k(logprobs).double().exp()
        for first in range(0, self._rows, PICKED):
            at = slice(first, first + PICKED)
            once = probs[at] * _are_first(ids[at])
            factors = (slopes[at] * (grads[at] - of_all[at] * once)).to(total.dtype)
            factors = torch.where(ids[at] == NO_ID, 0.0, factors)
            if self._keep is not None:
                factors = torch.where(self._keep[at, None], factors, 0.0)
            words = weight[_columns(ids[at], weight.shape[0])].to(total.dtype)
            total[at] += (factors[:, None] @ words)[:, 0]
        return total

    def _kept(self, grads: Tensor) -> Tensor:
        """Gradients [R, ...] of the tokens that exist; 0 of the others."""
        if self._keep is None:
            return grads
        keep = self._keep.view(-1, *(1,) * (grads.dim() - 1))
        return torch.where(keep, grads, 0.0)


PICKED = 128
"""Tokens whose words' weights, [n, K, D], the backward holds at a time."""


def _store(vectors: Tensor, model: ChunkOfModel, grad: Tensor) -> None:
    """Store the vectors of a chunk, of a gradient of its logits, whose memory is changed."""
    grad = model.before_softcap(grad)[0]
    model.chunk.put_rows(vectors, to_hidden(grad, model.head.weight, model.rows))


def _columns(ids: Tensor, words: int) -> Tensor:
    """Ids as words [n, K], within the vocabulary; the greatest in place of one that is none."""
    ids = of_k(ids)
    if words == 0:
        return ids[:0]
    greatest = ids.amax(-1, keepdim=True)
    return torch.where(ids == NO_ID, greatest, ids).clamp(0, words - 1)


def _are_first(ids: Tensor) -> Tensor:
    """[n, K]: whether no earlier id of the token is the same."""
    same = ids[:, :, None] == ids[:, None, :]
    return ~same.tril(-1).any(-1)
