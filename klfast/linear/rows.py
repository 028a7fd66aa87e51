"""The kernels over logits on a chunk's logits, and what they make of all tokens.

Shapes: R tokens, of which a chunk has n, with K ids a token or one; V words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from klfast.linear.call import LinearCall
from klfast.linear.chunks import MOST, Chunk, chunks_of, length_of
from klfast.linear.models import ChunkOfModel
from klfast.logits.call import DIVERGENCES, ENTROPIES
from klfast.ops.table import Ops

T = TypeVar("T")

Grads = list[Tensor | None]
"""Gradients of the logits of the policy, and of the reference where there is one."""


class Tokens(NamedTuple):
    """The numbers of one model's tokens, for all R."""

    logprobs: Tensor
    """[R] or [R, K]."""
    entropy: Tensor
    """[R]; [0] if not wanted."""
    saved: list[Tensor]
    """[numbers, n] of each chunk in turn, for the backward."""


class Rows(NamedTuple):
    """What a call asks of each token; None for what it does not."""

    kl: Tensor | None
    """[R]."""
    kl_saved: list[Tensor]
    """[numbers, n] of each chunk in turn, for the backward."""
    tokens: tuple[Tokens | None, ...]
    """One a model."""


def length_of_chunks(call: LinearCall) -> int:
    """The tokens of a chunk."""
    words = call.policy.head.weight.shape[0] if call.shards is None else call.shards.widest
    return call.chunk or length_of(words, call.arithmetic(), call.first().device)


def chunks(call: LinearCall) -> Iterator[list[ChunkOfModel]]:
    """The models' logits, chunk after chunk, in memory that all chunks share."""
    words, dtype = call.policy.head.weight.shape[0], call.arithmetic()
    rows, length = call.shape.numel(), length_of_chunks(call)
    memory: list[Tensor] = []
    # More rows than MOST are never filled up: they would take memory that no token needs.
    padded = call.chunk is not None and length <= MOST
    for chunk in chunks_of(rows, call.keep, length, padded=padded):
        if not memory:  # the first chunk is the largest
            memory = [call.first().new_empty(chunk.size, words, dtype=dtype) for _ in call.models()]
        both = zip(call.models(), memory, strict=True)
        yield [ChunkOfModel(model, chunk, own) for model, own in both]


class RowOps:
    """The ops, with a call's options."""

    def __init__(self, call: LinearCall, ops: Ops) -> None:
        self.call, self._ops = call, ops
        of = call.divergence
        self._is_forward = of is not None and of.direction == "forward"
        if of is not None:
            name = "jsd" if of.direction == "jsd" else "kl"
            self._options = (DIVERGENCES.index(name), of.jsd_beta, call.temperature)

    def empty(self) -> Rows:
        """Zeros for all tokens."""
        policy, call = self.empty_tokens(self.call.return_entropy), self.call
        if call.divergence is None:
            return Rows(None, [], (policy,))
        kl = call.nothing().contiguous()
        return Rows(kl, [], (policy, self.empty_tokens(want_entropy=False)))

    def empty_tokens(self, want_entropy: bool) -> Tokens | None:
        """Zeros for one model's tokens; None if nothing is asked of them."""
        ids, entropy = self.call.token_ids, self.call.nothing().contiguous()
        if ids is None and not want_entropy:
            return None
        logprobs = entropy.new_zeros(entropy.shape if ids is None else ids.shape)
        return Tokens(logprobs, entropy if want_entropy else entropy.new_empty(0), [])

    def compute_tokens(self, own: Sequence[ChunkOfModel], rows: Rows) -> None:
        """Store the log-probs and entropies of a chunk's tokens that the call asks for."""
        chunk = own[0].chunk
        if self.call.on_chunk is not None:
            self.call.on_chunk(own[0].logits()[0], chunk)
        for model, tokens in zip(own, rows.tokens, strict=True):
            if tokens is not None:
                self.compute_model(model, tokens, bool(tokens.entropy.numel()))

    def compute_model(self, model: ChunkOfModel, tokens: Tokens, want_entropy: bool) -> None:
        """Store those of one model."""
        chunk = model.chunk
        ids = self.ids(chunk)
        logprobs, entropy, saved = self._ops.token_logprobs_fwd(
            model.logits(),
            ids,
            chunk.keep,
            self.call.temperature,
            want_entropy,
            self.inverse(chunk),
        )
        chunk.put_rows(tokens.logprobs, logprobs.view(ids.shape))
        tokens.saved.append(saved)
        if want_entropy:
            chunk.put(tokens.entropy, entropy)

    def divergences(
        self,
        own: Sequence[ChunkOfModel],
        out: Tensor,
        out_saved: list[Tensor],
        weights: Tensor | None = None,
        wants: Sequence[bool] = (False, False),
    ) -> Grads:
        """Store the divergences of a chunk's tokens, [R], and what a backward needs, [numbers, n];
        return the gradients of sum(weights * divergences) that are wanted, in the logits' memory
        where no softcap wants these. ``weights``: [n].
        """
        chunk, logits = own[0].chunk, [model.logits() for model in own]
        models, is_over = self.in_order(logits), any(wants) and not have_softcap(own)
        options, of_models = self._options, (*self.in_order(wants), self.inverse(chunk))
        grads: Sequence[Tensor | None] = models
        if is_over:
            rows, saved = self._ops.kl_divergence_fwd_(
                *models, chunk.keep, *options, weights, *of_models
            )
        else:
            no_entropy = ENTROPIES.index("none")
            rows, _, _, saved, *grads, _ = self._ops.kl_divergence_fwd(
                *models, None, chunk.keep, *options, no_entropy, weights, *of_models
            )
        chunk.put(out, rows)
        out_saved.append(saved)
        return wanted(self.in_order(grads), wants)

    def divergence_gradients(
        self, own: Sequence[ChunkOfModel], rows: Rows, incoming: Tensor, wants: Sequence[bool]
    ) -> Grads:
        """The gradients of the logits that come from those of the divergences, [R]; in the logits'
        memory where no softcap wants these.
        """
        assert rows.kl is not None
        chunk, logits = own[0].chunk, [model.logits() for model in own]
        known, of_rows = (chunk.of(rows.kl), rows.kl_saved[chunk.number]), chunk.of(incoming)
        of_models = (*self.in_order(wants), self.inverse(chunk))
        models = self.in_order(logits)
        grads: Sequence[Tensor | None] = models
        if have_softcap(own):
            alone, no_entropy = (None, None, None), ENTROPIES.index("none")
            options = (*self._options, no_entropy, *known, None, of_rows, *alone)
            grads = self._ops.kl_divergence_bwd(*models, None, chunk.keep, *options, *of_models)
        else:
            self._ops.kl_divergence_bwd_(
                *models, chunk.keep, *self._options, *known, of_rows, *of_models
            )
        return wanted(self.in_order(grads), wants)

    def token_gradient(
        self,
        model: ChunkOfModel,
        tokens: Tokens,
        of_logprobs: Tensor | None,
        of_entropy: Tensor | None,
        *,
        in_place: bool,
    ) -> Tensor:
        """The gradient of a model's logits that comes from those of its tokens' numbers, of the
        chunk alone: [n] or [n, K], and [n]. In place it is left in the logits' memory.
        """
        chunk, logits = model.chunk, model.logits()
        arguments = (
            logits,
            self.ids(chunk),
            chunk.keep,
            tokens.saved[chunk.number],
            tokens.logprobs[chunk.at].reshape(-1),
            chunk.of(tokens.entropy) if tokens.entropy.numel() else tokens.entropy,
            self.call.temperature,
            None if of_logprobs is None else of_logprobs.reshape(-1).contiguous(),
            None if of_entropy is None else of_entropy.contiguous(),
            self.inverse(chunk),
        )
        if not in_place:
            return self._ops.token_logprobs_bwd(*arguments)
        self._ops.token_logprobs_bwd_(*arguments)
        return logits

    def ids(self, chunk: Chunk) -> Tensor:
        """[n] or [n, K]; the first word where the call has none."""
        ids = self.call.token_ids
        if ids is None:
            return torch.zeros(chunk.tokens, dtype=torch.int64, device=self.call.first().device)
        return ids[chunk.at].contiguous()

    def inverse(self, chunk: Chunk) -> Tensor | None:
        """1 / temperature: of the chunk's tokens, [n], 0-dim for all; None where it is a number."""
        inverse = self.call.inverse_temperature
        return inverse if inverse is None or inverse.dim() == 0 else chunk.of(inverse)

    def scale(self, chunk: Chunk) -> float | Tensor:
        """1 / temperature: a number, 0-dim, or of the chunk's ids, [n] or [n, 1]."""
        inverse = self.inverse(chunk)
        if inverse is None:
            return 1 / self.call.temperature
        return inverse if inverse.dim() == 0 or self.ids(chunk).dim() == 1 else inverse[:, None]

    def in_order(self, policy_first: Sequence[T]) -> Sequence[T]:
        """What belongs to policy and reference in the order of the ops, and back: KL(ref || policy)
        is KL(policy || ref) with the roles exchanged.
        """
        return policy_first[::-1] if self._is_forward else policy_first


def have_softcap(own: Sequence[ChunkOfModel]) -> bool:
    return any(model.head.softcap is not None for model in own)


def wanted(grads: Sequence[Tensor | None], wants: Sequence[bool]) -> Grads:
    return [grad if want else None for grad, want in zip(grads, wants, strict=True)]
