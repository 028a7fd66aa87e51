"""The ops over logits, applied to a chunk's logits, and their results for all tokens.

Shapes: R tokens, of which a chunk has n, with one or K ids per token; vocabulary size V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.args.heads import Hidden
from klfast.args.rows import ENTROPIES, Rows, RowsArgs
from klfast.autograd.chunks import MOST, Chunk, ChunkOfModel, chunks_of, length_of
from klfast.autograd.context import Grads, wanted
from klfast.autograd.token_loss import loss_of
from klfast.ops.schemas import Ops
from klfast.types.dtypes import picks_dtype

_NO_ENTROPY = ENTROPIES.index("none")


class TokenOutputs(NamedTuple):
    """The outputs of one model, for all R tokens."""

    logprobs: Tensor  # [R] or [R, K]
    entropy: Tensor  # [R]; [0] if not wanted
    saved: list[Tensor]  # [numbers, n] of each chunk in turn, for the backward


class Found(NamedTuple):
    """The requested outputs of each token; None if not requested."""

    kl: Tensor | None  # [R], the divergences or the caller's losses
    kl_saved: list[Tensor]  # [numbers, n] of each chunk in turn, for the backward
    tokens: tuple[TokenOutputs | None, ...]  # one per model

    def rows(self, args: RowsArgs) -> Rows:
        """The outputs without the saved numbers."""
        has_ids, of_two = args.token_ids is not None, (*self.tokens, None)[:2]
        first, second = [t.logprobs if t is not None and has_ids else None for t in of_two]
        policy = self.tokens[args.policy]
        entropy = policy.entropy if policy is not None and args.return_entropy else None
        return Rows(self.kl, first, second, entropy)


def length_of_chunks(args: RowsArgs, source: Hidden) -> int:
    """The tokens of a chunk."""
    words = source.words() if args.shards is None else args.shards.widest
    # Every chunk reads and writes the gradient of the weight, so few chunks save time. A loss has
    # the memory of two models' logits, which a divergence takes.
    times = 1 if args.loss is None else 2
    return source.chunk or length_of(words, args.dtype, args.device, times)


class RowOps:
    """The ops, with a call's options."""

    def __init__(self, args: RowsArgs, source: Hidden, ops: Ops) -> None:
        self.args, self.source, self._ops = args, source, ops
        self.models = source.models()

    def chunks(self) -> Iterator[list[ChunkOfModel]]:
        """The models' logits, chunk by chunk, in memory that all chunks share."""
        args, source = self.args, self.source
        rows, length = args.shape.numel(), length_of_chunks(args, source)
        memory: list[Tensor] = []
        # Chunks of more than MOST rows are never filled up, as this would waste memory.
        padded = source.chunk is not None and length <= MOST
        for chunk in chunks_of(rows, args.keep, length, padded=padded):
            if not memory:  # the first chunk is the largest
                hidden, (weight, *_) = self.models[0]
                shape = chunk.size, weight.shape[0]
                memory = [hidden.new_empty(shape, dtype=args.dtype) for _ in self.models]
            both = zip(self.models, memory, strict=True)
            yield [ChunkOfModel(model, chunk, own) for model, own in both]

    def zeros(self) -> Tensor:
        """[R] zeros."""
        return torch.zeros(self.args.shape.numel(), dtype=self.args.dtype, device=self.args.device)

    def empty(self) -> Found:
        """Zeros for all tokens."""
        args = self.args
        has_values = args.divergence is not None or args.loss is not None
        tokens = [
            self.empty_tokens(m == args.policy and bool(args.return_entropy))
            for m in range(len(self.models))
        ]
        return Found(self.zeros() if has_values else None, [], tuple(tokens))

    def empty_tokens(self, want_entropy: bool) -> TokenOutputs | None:
        """Zeros for one model's tokens; None if nothing is requested for them."""
        ids = self.args.token_ids
        if ids is None and not want_entropy:
            return None
        entropy = self.zeros()
        shape, dtype = entropy.shape, entropy.dtype
        if ids is not None:
            shape, dtype = ids.shape, picks_dtype(ids, entropy.dtype)
        logprobs = entropy.new_zeros(shape, dtype=dtype)
        return TokenOutputs(logprobs, entropy if want_entropy else entropy.new_empty(0), [])

    def compute_tokens(self, own: Sequence[ChunkOfModel], found: Found) -> None:
        """Store the requested log-probs and entropies of a chunk's tokens."""
        for model, tokens in zip(own, found.tokens, strict=True):
            if tokens is not None:
                self.compute_model(model, tokens, bool(tokens.entropy.numel()))

    def compute_model(self, model: ChunkOfModel, tokens: TokenOutputs, want_entropy: bool) -> None:
        """Store the log-probs and entropies of one model."""
        chunk = model.chunk
        ids, options = self.ids(chunk), (self.args.temperature, want_entropy, self.inverse(chunk))
        logprobs, entropy, saved = self._ops.token_logprobs_fwd(
            model.logits(), ids, chunk.keep, *options
        )
        chunk.put(tokens.logprobs, logprobs.view(ids.shape))
        tokens.saved.append(saved)
        if want_entropy:
            chunk.put(tokens.entropy, entropy)

    def values(
        self,
        own: Sequence[ChunkOfModel],
        tokens: TokenOutputs | None,
        out: Tensor,
        out_saved: list[Tensor],
        weights: Tensor | None = None,
        wants: Sequence[bool] = (False, False),
    ) -> Grads:
        """``divergences``, or the caller's losses of a chunk's tokens with known log-probs."""
        if self.args.loss is None:
            return self.divergences(own, out, out_saved, weights, wants)
        assert tokens is not None
        (model,) = own
        found = loss_of(self.args, model.chunk, tokens.logprobs, weights if wants[0] else None)
        model.chunk.put(out, found.values)
        if not wants[0]:
            return [None]
        in_place = model.head.softcap is None  # its derivative needs the logits
        return [self.token_gradient(model, tokens, found.gradient, None, in_place=in_place)]

    def divergences(
        self,
        own: Sequence[ChunkOfModel],
        out: Tensor,
        out_saved: list[Tensor],
        weights: Tensor | None = None,
        wants: Sequence[bool] = (False, False),
    ) -> Grads:
        """Store the divergences of a chunk's tokens, [R], and the numbers for a backward,
        [numbers, n]. Return the wanted gradients of sum(weights * divergences). Without a softcap
        they overwrite the logits, which a softcap still needs. ``weights``: [n].
        """
        chunk, models = own[0].chunk, [model.logits() for model in own]
        options, last = self.args.options(), (weights, *wants, self.inverse(chunk))
        grads: Grads = models
        if any(wants) and not _have_softcap(own):
            kl, saved = self._ops.kl_divergence_fwd_(*models, chunk.keep, *options, *last)
        else:
            kl, _, _, saved, *grads, _ = self._ops.kl_divergence_fwd(
                *models, None, chunk.keep, *options, _NO_ENTROPY, *last
            )
        chunk.put(out, kl)
        out_saved.append(saved)
        return wanted(grads, wants)

    def divergence_gradients(
        self, own: Sequence[ChunkOfModel], found: Found, incoming: Tensor, wants: Sequence[bool]
    ) -> Grads:
        """The gradients of the logits, from the gradients of the divergences, [R]. Without a
        softcap they overwrite the logits.
        """
        assert found.kl is not None
        chunk, models = own[0].chunk, [model.logits() for model in own]
        known, of_rows = (chunk.of(found.kl), found.kl_saved[chunk.number]), chunk.of(incoming)
        options, last = self.args.options(), (*wants, self.inverse(chunk))
        if _have_softcap(own):
            of = (*options, _NO_ENTROPY, *known, None, of_rows, None, None, None)
            return self._ops.kl_divergence_bwd(*models, None, chunk.keep, *of, *last)
        self._ops.kl_divergence_bwd_(*models, chunk.keep, *options, *known, of_rows, *last)
        return wanted(models, wants)

    def token_gradient(
        self,
        model: ChunkOfModel,
        tokens: TokenOutputs,
        of_logprobs: Tensor | None,
        of_entropy: Tensor | None,
        *,
        in_place: bool,
    ) -> Tensor:
        """The gradient of a model's logits, from the gradients of its tokens' log-probs, [n] or
        [n, K], and entropies, [n], in one chunk. In place it overwrites the logits.
        """
        chunk, logits = model.chunk, model.logits()
        arguments = (
            logits,
            self.ids(chunk),
            chunk.keep,
            tokens.saved[chunk.number],
            chunk.of(tokens.logprobs).view(-1),
            chunk.of(tokens.entropy) if tokens.entropy.numel() else tokens.entropy,
            self.args.temperature,
            None if of_logprobs is None else of_logprobs.reshape(-1).contiguous(),
            None if of_entropy is None else of_entropy.contiguous(),
            self.inverse(chunk),
        )
        if not in_place:
            return self._ops.token_logprobs_bwd(*arguments)
        self._ops.token_logprobs_bwd_(*arguments)
        return logits

    def ids(self, chunk: Chunk) -> Tensor:
        """[n] or [n, K]; id 0 if the call has none."""
        ids = self.args.token_ids
        if ids is None:
            return torch.zeros(chunk.tokens, dtype=torch.int64, device=self.args.device)
        return chunk.of(ids)

    def inverse(self, chunk: Chunk) -> Tensor | None:
        """1 / temperature for the chunk's tokens, [n] or 0-dim; None if it is a number."""
        inverse = self.args.inverse_temperature
        return inverse if inverse is None or inverse.dim() == 0 else chunk.of(inverse)

    def scale(self, chunk: Chunk) -> float | Tensor:
        """1 / temperature: a number, a 0-dim tensor, or one per token, [n] or [n, 1]."""
        inverse = self.inverse(chunk)
        if inverse is None:
            return 1 / self.args.temperature
        return inverse if inverse.dim() == 0 or self.ids(chunk).dim() == 1 else inverse[:, None]


def _have_softcap(own: Sequence[ChunkOfModel]) -> bool:
    return any(model.head.softcap is not None for model in own)
