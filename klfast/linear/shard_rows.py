"""The ops on a chunk's logits where each rank has a shard of the vocabulary, its rows of the heads.

A chunk's rows are combined over the ranks while its logits are there, so that shards take no
product more. What a backward needs of them is a table of numbers per token, in the place of what
ops save. Shapes: R tokens, of which a chunk has n, with K ids a token or one; S shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from klfast.linear.call import LinearCall
from klfast.linear.chunks import Chunk
from klfast.linear.models import ChunkOfModel
from klfast.linear.rows import Grads, RowOps, Rows, Tokens, have_softcap, wanted
from klfast.logits.arguments import NO_ID, of_k
from klfast.logits.call import ENTROPIES
from klfast.logits.chain_rule import PairRows, TokenRows
from klfast.logits.normalizers import Units
from klfast.logits.shard_rows import (
    NO_ENTROPY,
    PairsOfShard,
    Plan,
    TokensOfShard,
    pair_gradients,
    pair_rows,
    token_gradient,
    token_rows,
)
from klfast.logits.shards import Shards
from klfast.ops.table import SAVED_OF_PAIRS, SAVED_OF_TOKENS, Ops


class ShardRowOps(RowOps):
    """As ``RowOps``, over all words."""

    def __init__(self, call: LinearCall, ops: Ops, units: Units) -> None:
        super().__init__(call, ops)
        assert call.shards is not None
        self._shards: Shards = call.shards
        self._units = units

    def numbers_of_tokens(self, want_entropy: bool) -> int:
        """Own saved numbers and log-probs, those of the shards, masses; four for entropies."""
        ids = self._call.token_ids
        picks = 1 if ids is None or ids.dim() == 1 else ids.shape[1]
        return 2 * (SAVED_OF_TOKENS + picks) + self._shards.ranks.size + 4 * want_entropy

    def numbers_of_pairs(self) -> int:
        """The same of pairs, and share and surplus."""
        return 2 * (SAVED_OF_PAIRS + 1 + self._shards.ranks.size) + 2

    def own_ids(self, chunk: Chunk, none: int) -> Tensor:
        return self._shards.own_ids(self.ids(chunk), none)

    def _plan(self, chunk: Chunk, ids: Tensor | None, want_entropy: bool) -> Plan:
        return Plan(
            ids,
            chunk.keep,
            self.inverse(chunk),
            self._call.temperature,
            chunk.tokens,
            ENTROPIES.index("first") if want_entropy else NO_ENTROPY,
            self._shards,
            self._ops,
            self._units,
        )

    def compute_model(self, model: ChunkOfModel, tokens: Tokens, want_entropy: bool) -> None:
        """See ``RowOps``."""
        chunk, dtype = model.chunk, self._call.arithmetic()
        plan = self._plan(chunk, self.ids(chunk), want_entropy)
        of_shard, of_all = token_rows(model.logits(), plan)
        chunk.put_rows(tokens.logprobs, of_all.logprobs.to(dtype))
        chunk.put(tokens.saved, _packed_tokens(of_shard, of_all))
        if of_all.entropy is not None:
            chunk.put(tokens.entropy, of_all.entropy.to(dtype))

    def divergences(
        self,
        own: Sequence[ChunkOfModel],
        out: Tensor,
        out_saved: Tensor | None = None,
        weights: Tensor | None = None,
        wants: Sequence[bool] = (False, False),
    ) -> Grads:
        """See ``RowOps``."""
        chunk = own[0].chunk
        plan = self._plan(chunk, None, want_entropy=False)
        first, second = self.in_order([model.logits() for model in own])
        of_shard, of_all = pair_rows(first, second, plan)
        chunk.put(out, of_all.kl.to(self._call.arithmetic()))
        if out_saved is not None:
            chunk.put(out_saved, _packed_pairs(of_shard, of_all))
        if weights is None or not any(wants):
            return [None] * len(own)
        return self._gradients(own, plan, (of_shard, of_all), weights, wants)

    def divergence_gradients(
        self, own: Sequence[ChunkOfModel], rows: Rows, incoming: Tensor, wants: Sequence[bool]
    ) -> Grads:
        """See ``RowOps``."""
        assert rows.kl_saved is not None
        chunk = own[0].chunk
        plan = self._plan(chunk, None, want_entropy=False)
        known = self._unpacked_pairs(chunk.of(rows.kl_saved))
        return self._gradients(own, plan, known, chunk.of(incoming), wants)

    def _gradients(
        self,
        own: Sequence[ChunkOfModel],
        plan: Plan,
        known: tuple[PairsOfShard, PairRows],
        incoming: Tensor,
        wants: Sequence[bool],
    ) -> Grads:
        """The gradients of the logits that come from those of the divergences, [n]."""
        first, second = self.in_order([model.logits() for model in own])
        grads = pair_gradients(
            first,
            second,
            plan,
            *known,
            (incoming, None, None, None),
            self.in_order(wants),
            in_place=not have_softcap(own),
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
        """See ``RowOps``."""
        chunk, want_entropy = model.chunk, bool(tokens.entropy.numel())
        plan = self._plan(chunk, self.ids(chunk), want_entropy)
        known = self._unpacked_tokens(chunk, chunk.of(tokens.saved), want_entropy)
        incoming = of_logprobs, of_entropy
        return token_gradient(model.logits(), plan, *known, *incoming, in_place=in_place)

    def _unpacked_tokens(
        self, chunk: Chunk, table: Tensor, want_entropy: bool
    ) -> tuple[TokensOfShard, TokenRows]:
        """The inverse of ``_packed_tokens``."""
        ids, dtype = of_k(self.own_ids(chunk, NO_ID)), self._call.arithmetic()
        of_rows = SAVED_OF_TOKENS, ids.shape[1]
        sizes = *of_rows, *of_rows, self._shards.ranks.size
        saved, logprobs, of_saved, of_shards, masses, *others = torch.split(
            table, [*sizes, *(1,) * (4 * want_entropy)]
        )
        nothing = table.new_empty(0)
        entropy, of_entropy, *share_and_surplus = [x[0] for x in others] or [nothing, nothing]
        share, surplus = share_and_surplus or (None, None)
        own = TokensOfShard(ids, saved, logprobs.T.to(dtype).contiguous(), entropy.to(dtype))
        return own, TokenRows(
            logprobs=nothing,
            entropy=None,
            masses=masses.T.contiguous()[None],
            saved=of_saved,
            of_shards=of_shards.T.reshape(-1),
            entropy_of_shards=of_entropy,
            share=share,
            surplus=surplus,
        )

    def _unpacked_pairs(self, table: Tensor) -> tuple[PairsOfShard, PairRows]:
        """The inverse of ``_packed_pairs``."""
        size, dtype, nothing = self._shards.ranks.size, self._call.arithmetic(), table.new_empty(0)
        saved, of_saved, kl, of_shards, share, surplus, masses, ref_masses = torch.split(
            table, [SAVED_OF_PAIRS, SAVED_OF_PAIRS, 1, 1, 1, 1, size, size]
        )
        none = nothing.to(dtype)
        own = PairsOfShard(None, None, saved, kl[0].to(dtype), none, none, none)
        return own, PairRows(
            kl=nothing,
            entropy=None,
            logprobs=None,
            ref_logprobs=None,
            masses=masses.T.contiguous()[None],
            ref_masses=ref_masses.T.contiguous()[None],
            saved=of_saved,
            of_shards=of_shards[0],
            entropy_of_shards=nothing,
            share=share[0],
            surplus=surplus[0],
            entropy_share=None,
            entropy_surplus=None,
        )


def _packed_tokens(own: TokensOfShard, rows: TokenRows) -> Tensor:
    """What a backward needs of a model's tokens, [numbers, n]."""
    parts = [own.saved, own.logprobs.T, rows.saved]
    parts += [rows.of_shards.view(own.logprobs.shape).T, rows.masses[0].T]
    if rows.share is not None and rows.surplus is not None:
        of_entropy = own.entropy, rows.entropy_of_shards, rows.share, rows.surplus
        parts += [x[None] for x in of_entropy]
    return torch.cat([part.double() for part in parts])


def _packed_pairs(own: PairsOfShard, rows: PairRows) -> Tensor:
    """What a backward needs of divergences, [numbers, n]."""
    numbers = own.kl, rows.of_shards, rows.share, rows.surplus
    parts = [own.saved, rows.saved, *(x[None] for x in numbers)]
    parts += [masses[0].T for masses in (rows.masses, rows.ref_masses)]
    return torch.cat([part.double() for part in parts])
