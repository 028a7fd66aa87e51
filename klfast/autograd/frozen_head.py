"""Gradients of a token's outputs to its hidden states under a frozen head, stored as vectors.

Shapes: R tokens with hidden size D, of which a chunk has n, with one or K ids per token; vocabulary
size V.

A log-prob's gradient is the sum over the vocabulary of (own - p_v) W_v. The forward stores the sum
of -p_v W_v over the entries that are no ids of the token. The backward adds the token's ids with
the factor g - G p, which keeps its digits where p is nearly 1. Here g is the incoming gradient of a
log-prob, and G is the sum of g over a token's ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.args.heads import Hidden
from klfast.args.logits import NO_ID, of_k
from klfast.args.rows import RowsArgs
from klfast.autograd.chunks import ChunkOfModel, softcap_derivative, to_hidden
from klfast.autograd.context import is_batched
from klfast.autograd.hidden_rows import RowOps, TokenOutputs, length_of_chunks


class HiddenGradients(NamedTuple):
    """The gradients of a model's outputs to its hidden states, [R, D]; None if not requested."""

    of_kl: Tensor | None
    of_entropy: Tensor | None
    of_other_tokens: Tensor | None  # for log-probs, without the entries that are ids of the token
    derivatives: Tensor | None
    """[R] or [R, K]: d logit / d z at the ids. The logits are scaled, and z are the logits before
    the softcap."""

    @classmethod
    def zeros(
        cls, args: RowsArgs, hidden: Tensor, tokens: TokenOutputs | None, has_kl: bool
    ) -> HiddenGradients:
        """Zeros for all tokens of a model, of which ``tokens`` are the other outputs."""

        def vectors(wanted: bool) -> Tensor | None:
            return hidden.new_zeros(hidden.shape, dtype=args.dtype) if wanted else None

        has_entropy = tokens is not None and tokens.entropy.numel() > 0
        picks = None
        if tokens is not None and args.token_ids is not None and tokens.logprobs.numel() > 0:
            picks = tokens.logprobs
        return cls(
            vectors(has_kl),
            vectors(has_entropy and args.return_entropy != "detached"),
            vectors(picks is not None),
            None if picks is None else torch.zeros_like(picks),
        )

    def add_tokens(self, kernels: RowOps, model: ChunkOfModel, tokens: TokenOutputs) -> None:
        """Store the vectors of a chunk's log-probs and entropies."""
        chunk = model.chunk
        if self.of_entropy is not None:
            ones = tokens.entropy.new_ones(chunk.tokens)
            grad = kernels.token_gradient(model, tokens, None, ones, in_place=False)
            store(self.of_entropy, model, grad)
        if self.of_other_tokens is None or self.derivatives is None:
            return
        ids = kernels.ids(chunk)
        exist = ids != NO_ID
        shares = exist.to(tokens.logprobs.dtype)
        if ids.dim() == 2:
            # The shares of a token's ids add up to 1, as the backward multiplies by the sum G.
            shares /= exist.sum(-1, keepdim=True).clamp_(min=1)
        grad = kernels.token_gradient(model, tokens, shares, None, in_place=False)
        own_ids = kernels.args.own_ids(ids)
        words = _columns(own_ids, model.logits().shape[-1])
        if words.numel() > 0:
            # The backward adds the terms of the ids themselves, with the factor g - G p.
            has_word = (of_k(own_ids) != NO_ID).any(-1, keepdim=True)
            grad[0].scatter_(-1, words, torch.where(has_word, 0, grad[0].gather(-1, words)))
        store(self.of_other_tokens, model, grad)
        derivatives = torch.ones_like(shares).mul_(kernels.scale(chunk))
        if words.numel() > 0 and (cap := model.head.softcap) is not None:
            of_ids = softcap_derivative(model.logits()[0].gather(-1, words), cap)
            derivatives *= of_ids.view(ids.shape)
        chunk.put(self.derivatives, derivatives)

    def gradient(
        self,
        args: RowsArgs,
        source: Hidden,
        model: int,
        logprobs: Tensor | None,
        grad_kl: Tensor | None,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """The gradient of the hidden states, [R, D], from the outputs' gradients, [R] or [R, K].

        ``model`` is an index, and ``logprobs`` are the model's. A gradient of None means zeros.
        """
        hidden, (weight, *_) = source.models()[model]
        total = hidden.new_zeros(hidden.shape, dtype=args.dtype)
        for sent in (grad_kl, grad_logprobs, grad_entropy):
            if sent is not None and is_batched(sent):
                total = total + torch.zeros_like(sent).sum()  # in place, it holds a batch too
        for own, grad in ((self.of_kl, grad_kl), (self.of_entropy, grad_entropy)):
            if own is not None and grad is not None:
                total.addcmul_(_kept(grad, args)[:, None], own)
        if self.of_other_tokens is None or grad_logprobs is None or logprobs is None:
            return total
        assert args.token_ids is not None
        assert self.derivatives is not None
        # In fp64, because g - G p would lose its digits where p is nearly 1.
        grads = of_k(_kept(grad_logprobs, args)).double()
        grads = torch.where(of_k(args.token_ids) == NO_ID, 0.0, grads)
        of_all = grads.sum(-1, keepdim=True)
        total.addcmul_(of_all.to(total.dtype), self.of_other_tokens)
        if weight.shape[0] == 0:
            return total
        ids = of_k(args.own_ids(args.token_ids))
        derivatives, logprobs = of_k(self.derivatives), of_k(logprobs)
        for at, places in _pieces(length_of_chunks(args, source), ids.shape, weight):
            # A token may have the same id twice. Its probability is subtracted once.
            once = logprobs[at].double().exp() * _are_first(ids[at])
            factors = (derivatives[at] * (grads[at] - of_all[at] * once)).to(total.dtype)
            factors = torch.where(ids[at] == NO_ID, 0.0, factors)
            if args.keep is not None:
                factors = torch.where(args.keep[at, None], factors, 0.0)
            columns = _columns(ids[at], weight.shape[0])
            for some in places:
                # A temporary without a name is freed before the next piece is made.
                total[at] += (factors[:, None, some] @ weight[columns[:, some]].to(total.dtype))[
                    :, 0
                ]
        return total


def _kept(grads: Tensor, args: RowsArgs) -> Tensor:
    """Gradients [R, ...], with 0 for tokens that do not exist."""
    if args.keep is None:
        return grads
    keep = args.keep.view(-1, *(1,) * (grads.dim() - 1))
    return torch.where(keep, grads, 0.0)


PICKED = 128  # the most tokens whose weight rows, [n, K, D], the backward holds at a time


def _pieces(length: int, shape: torch.Size, weight: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Pieces of ids [R, K]: some tokens at a time, and some of their ids at a time. The weights of
    a piece have at most as many numbers as the logits of a chunk, of ``length`` tokens.
    """
    rows, picks = shape
    most = max(length * weight.shape[0] // weight.shape[1], 1)
    # All ids of a token at once, where they fit, take one matmul.
    together = min(picks, most)
    tokens = min(max(most // together, 1), PICKED)
    for first in range(0, rows, tokens):
        yield slice(first, first + tokens), [slice(k, k + most) for k in range(0, picks, most)]


def store(vectors: Tensor, model: ChunkOfModel, grad: Tensor) -> None:
    """Store a chunk's vectors, from a gradient of its logits [1, n, V], which is overwritten."""
    grad = model.before_softcap(grad)[0]
    model.chunk.put(vectors, to_hidden(grad, model.head.weight, model.rows))


def _columns(ids: Tensor, words: int) -> Tensor:
    """Ids [n, K], clamped to the vocabulary; a token's greatest id replaces ``NO_ID``."""
    ids = of_k(ids)
    if words == 0:
        return ids[:0]
    greatest = ids.amax(-1, keepdim=True)
    return torch.where(ids == NO_ID, greatest, ids).clamp(0, words - 1)


def _are_first(ids: Tensor) -> Tensor:
    """[n, K]: True if no earlier id of the token is the same."""
    # A sort takes [n, K] numbers. A comparison of all pairs would take [n, K, K].
    ordered, places = ids.sort(dim=-1, stable=True)
    are_first = torch.ones_like(ids, dtype=torch.bool)
    are_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(are_first).scatter_(-1, places, are_first)
