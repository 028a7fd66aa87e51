"""The readable specification for a sharded vocabulary: the rows are gathered from all ranks.

Only the entries of a rank's own shard carry its graph. All ranks have the same loss, and each rank
gets the gradient of its own logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from klfast.args.rows import Shards
from klfast.autograd import context


def whole(logits: Tensor, shards: Shards | None) -> Tensor:
    """Gather this rank's logits [A, T, V_r] into the logits of the whole vocabulary, [A, T, V]."""
    if shards is None:
        return logits
    widths = shards.edges.diff().tolist()
    # An all-gather takes tensors of one shape, and shards may differ in width.
    padded = torch.nn.functional.pad(logits.detach(), (0, max(widths) - logits.shape[-1]))
    of_ranks = shards.ranks.all_gather(padded)
    blocks = [block[..., :width] for block, width in zip(of_ranks, widths, strict=True)]
    # Its own shard goes in with its graph.
    blocks[shards.ranks.rank] = _Once.apply(logits)  # type: ignore[no-untyped-call]
    rows = torch.cat(blocks, -1)
    # A factor, so that gradients are NaN too.
    return rows if shards.are_apart is None else rows * torch.where(shards.are_apart, torch.nan, 1)


class _Once(torch.autograd.Function):
    """Its input, whose gradient depends on other ranks' logits too: no graph of it is made."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        return context.guarded((grad,), grad)[0]


class AddedUp(torch.autograd.Function):
    """The same hidden states, whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shards: Shards) -> Tensor:
        ctx.ranks = shards.ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        total = grad.detach().clone(memory_format=torch.contiguous_format)
        ctx.ranks.add_up(total)
        return context.guarded((total,), grad)[0], None
