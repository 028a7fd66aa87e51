"""The shards of a vocabulary, and the rank that has each.

Shapes: R rows, S shards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.args.logits import NO_ID
from klfast.distributed.ranks import Ranks


class Shards(NamedTuple):
    """The shards of a vocabulary, one per rank, in the order of ranks."""

    ranks: Ranks
    edges: Tensor
    """[S + 1], int64: the first id of each shard, and the vocabulary size."""
    words: int | None
    """The vocabulary size; None if only the GPU knows it."""
    are_apart: Tensor | None = None
    """True if the ranks do not agree about the call, 0-dim; None if the host has checked this."""
    widest: int = 0
    """The size of the largest shard; 0 if only the GPU knows it."""

    def to(self, device: torch.device) -> Shards:
        """The shards on a device."""
        apart = None if self.are_apart is None else self.are_apart.to(device)
        edges, words = self.edges.to(device), self.words
        if words is None and device.type == "cpu":
            words = int(edges[-1])
        return self._replace(edges=edges, words=words, are_apart=apart)

    def has(self, token_ids: Tensor) -> Tensor:
        """True for ids in this rank's shard."""
        first, end = self.edges[self.ranks.rank], self.edges[self.ranks.rank + 1]
        return (token_ids >= first) & (token_ids < end)

    def own_ids(self, token_ids: Tensor, elsewhere: int) -> Tensor:
        """Ids as positions in this rank's shard; ``elsewhere`` for ids of other shards."""
        own = token_ids - self.edges[self.ranks.rank]
        return torch.where(self.has(token_ids), own, elsewhere)

    def owners(self, token_ids: Tensor) -> Tensor:
        """The shard of each id; ``NO_ID`` stays, and an id outside of the vocabulary gives S."""
        size = self.ranks.size
        owners = torch.searchsorted(self.edges[1:], token_ids, right=True)
        owners = torch.where(token_ids < 0, size, owners)
        return torch.where(token_ids == NO_ID, NO_ID, owners)
