"""The chunks in which the tokens of a call are computed.

Shapes: R tokens, of which a chunk has n; V words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BYTES = {"cuda": 600 * 2**20}
"""The size that the logits of one model's chunk are to have."""
BYTES_ELSEWHERE = 64 * 2**20
LEAST, MOST = 16, 4096
"""Tokens of a chunk under ``chunk="auto"``. Of fewer than 16 rows a product takes other kernels,
whose sums have other last bits (MKL, torch 2.13)."""


def length_of(words: int, dtype: torch.dtype, device: torch.device) -> int:
    """The tokens per chunk under ``chunk="auto"``: the power of two, within ``LEAST`` and ``MOST``,
    whose logits are nearest in size to ``BYTES``.
    """
    wanted = BYTES.get(device.type, BYTES_ELSEWHERE) / (words * dtype.itemsize)
    return min(max(1 << max(round(math.log2(wanted)), 0), LEAST), MOST)


class Chunk(NamedTuple):
    """Tokens that are computed together."""

    at: slice | Tensor
    """Their places among all, a slice or [n]."""
    tokens: int
    """n."""
    size: int
    """The rows of the products, >= n: those behind n are of no token."""
    number: int = 0
    """Its place among the chunks."""
    keep: Tensor | None = None
    """[n], which of them exist; None for all."""

    def of(self, values: Tensor) -> Tensor:
        """The values [..., R] of the tokens, [..., n]."""
        return values[..., self.at].contiguous()

    def rows(self, hidden: Tensor) -> Tensor:
        """The hidden states [R, D] of the tokens, [size, D]; zeros where none exists."""
        own = hidden[self.at]
        if self.keep is not None:
            own = torch.where(self.keep[:, None], own, 0)
        if self.size == self.tokens:
            return own.contiguous()
        padded = own.new_zeros(self.size, own.shape[1])
        padded[: self.tokens] = own
        return padded

    def put(self, out: Tensor, values: Tensor) -> None:
        """Store values [..., n] of the tokens into ``out`` [..., R]."""
        out[..., self.at] = values

    def put_rows(self, out: Tensor, rows: Tensor) -> None:
        """Store rows [>= n, D] of the tokens into ``out`` [R, D]."""
        out[self.at] = rows[: self.tokens]


def chunks_of(rows: int, keep: Tensor | None, length: int, *, padded: bool) -> Iterator[Chunk]:
    """The chunks of the tokens that exist, in their order; of all while a CUDA graph is captured,
    and of tensors without data.

    Args:
        rows: R.
        keep: [R], which tokens exist; None for all.
        length: tokens per chunk; the last has the rest.
        padded: whether every product has ``length`` rows, so that no token's bits depend on how
            many there are. Else at least ``LEAST``.
    """
    places = None if keep is None or _is_unknown(keep) else keep.nonzero()[:, 0]
    total = rows if places is None else places.shape[0]
    for number, first in enumerate(range(0, total, length)):
        count = min(length, total - first)
        own = slice(first, first + count)
        size = length if padded else max(count, min(LEAST, length))
        if places is not None:
            yield Chunk(places[own], count, size, number)
        else:
            yield Chunk(own, count, size, number, None if keep is None else keep[own])


def _is_unknown(keep: Tensor) -> bool:
    """Whether the number of kept tokens cannot be read: a CUDA graph is captured, or tensors have
    no data.
    """
    if keep.is_meta or type(keep) is not Tensor:  # FakeTensor
        return True
    return keep.is_cuda and torch.cuda.is_current_stream_capturing()
