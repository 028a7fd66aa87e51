"""Chunks of tokens: their tokens, their logits under a model, and their gradients.

Shapes: R tokens with hidden size D, of which a chunk has n; vocabulary size V. Logits and their
gradients are in the arithmetic's dtype, fp32 or fp64, and so are all sums of the three matmuls:

=================== ================================================================================
dtypes              matmul
=================== ================================================================================
all arithmetic's    torch's matmul
both bf16, CUDA     torch's matmul of bf16 with fp32 results (``out_dtype``), for which gradients
                    are rounded to bf16
both fp16, CUDA     for the logits torch's matmul of fp16 with fp32 results, else as below
all else            torch's matmul in the arithmetic's dtype, on ``BLOCK`` rows of the weight at a
                    time, so that no copy of it is held
=================== ================================================================================

Gradients are never rounded to fp16, because the gradient of a mean would underflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from klfast.args.heads import Model
from klfast.args.values import are_tracing
from klfast.autograd import context
from klfast.types.device import DEVICES, is_capturing

LEAST, MOST = 16, 4096
"""The bounds on tokens per chunk under ``chunk="auto"``. With fewer than 16 rows a matmul takes
other kernels, whose sums have other last bits (MKL, torch 2.13)."""


def length_of(words: int, dtype: torch.dtype, device: torch.device, times: int = 1) -> int:
    """The tokens per chunk under ``chunk="auto"``: the power of two from ``LEAST`` to ``MOST``
    whose logits are nearest in size to ``times`` as many ``chunk_bytes``.
    """
    wanted = times * DEVICES[device.type].chunk_bytes / (words * dtype.itemsize)
    return min(max(1 << max(round(math.log2(wanted)), 0), LEAST), MOST)


class Chunk(NamedTuple):
    """Tokens that are computed together."""

    at: slice | Tensor  # their indices among all tokens, a slice or [n]
    tokens: int  # n
    size: int  # the rows of the matmuls, >= n. The rows after n belong to no token
    number: int = 0  # its index among the chunks
    keep: Tensor | None = None  # [n], True for tokens that exist; None for all

    def of(self, values: Tensor) -> Tensor:
        """The values [R, ...] of the tokens, [n, ...]."""
        return values[self.at].contiguous()

    def put(self, out: Tensor, values: Tensor) -> None:
        """Store values [>= n, ...] of the tokens into ``out`` [R, ...]."""
        out[self.at] = values[: self.tokens]

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


def chunks_of(rows: int, keep: Tensor | None, length: int, *, padded: bool) -> Iterator[Chunk]:
    """The chunks of the tokens in ``keep``, [R], in their order, of ``length`` tokens but the last.

    They have all tokens while a CUDA graph is captured, or if tensors have no data. ``padded``:
    every matmul of the logits has ``length`` rows, so that a token's bits do not depend on the
    number of tokens. A matmul has at least ``LEAST`` rows.
    """
    places = None if keep is None or _is_unknown(keep) else keep.nonzero()[:, 0]
    total = rows if places is None else places.shape[0]
    for number, first in enumerate(range(0, total, length)):
        count = min(length, total - first)
        own = slice(first, first + count)
        # A matmul with another number of rows may have other last bits.
        size = max(length if padded else count, LEAST)
        if places is not None:
            yield Chunk(places[own], count, size, number)
        else:
            yield Chunk(own, count, size, number, None if keep is None else keep[own])


def _is_unknown(keep: Tensor) -> bool:
    """True if kept tokens cannot be counted: while a CUDA graph is captured, or without data."""
    if keep.is_meta or type(keep) is not Tensor or are_tracing():  # FakeTensor
        return True
    return not keep.is_cpu and is_capturing(keep.device)


class ChunkOfModel:
    """A model's hidden states of one chunk, and its logits in ``memory``, [>= size, V]."""

    def __init__(self, model: Model, chunk: Chunk, memory: Tensor) -> None:
        self.head, self.chunk = model.head, chunk
        self.rows = chunk.rows(model.hidden)
        self._all = memory[: chunk.size]
        logits_of(self.rows, self.head.weight, self._all)
        if self.head.bias is not None:
            self._all += self.head.bias
        if (cap := self.head.softcap) is not None:
            # In place, because logits are the largest memory of a call.
            self._all.div_(cap).tanh_().mul_(cap)

    def logits(self) -> Tensor:
        """[1, n, V], as the ops take them."""
        return self._all[None, : self.chunk.tokens]

    def before_softcap(self, grad: Tensor) -> Tensor:
        """Make the gradient before the softcap from the gradient after it, [1, n, V], in place."""
        if (cap := self.head.softcap) is not None:
            grad *= softcap_derivative(self.logits(), cap)
        return grad


def softcap_derivative(logits: Tensor, softcap: float) -> Tensor:
    """The derivative of c tanh(z / c) by z, from the capped logits: 1 - (logits / c)^2."""
    return 1 - (logits / softcap).square_()


class Gradients:
    """The gradients of a model's hidden states, weight and bias, summed over chunks.

    The sums are in ``dtype``, and are rounded once to their own dtype, when they are returned.
    """

    def __init__(self, model: Model, needs: Sequence[bool], dtype: torch.dtype) -> None:
        self._head, self._dtype = model.head, dtype
        self._needs_weight = needs[1]
        hidden, (_, bias, _) = model
        self.hidden = hidden.new_zeros(hidden.shape, dtype=dtype) if needs[0] else None
        self.bias = None
        if bias is not None and needs[2]:
            self.bias = bias.new_zeros(bias.shape, dtype=dtype)
        self.weight: Tensor | None = None
        """None until the first chunk, which saves writing zeros."""

    def add(self, own: ChunkOfModel, grad: Tensor, acting: Tensor | None) -> None:
        """Add the contributions of a gradient of the logits, [1, n, V]; it may be overwritten.
        ``acting``, [R], has the rows with a gradient. The others may hold NaN.
        """
        tokens = own.chunk.tokens
        rows, grad = own.rows, own.before_softcap(grad)[0]
        idle = None if acting is None else ~own.chunk.of(acting)[:, None]
        if idle is not None:
            rows, grad = rows[:tokens].masked_fill(idle, 0), grad.masked_fill_(idle, 0)
        if self.bias is not None:
            self.bias += grad.sum(0)
        if _rounds_gradients(rows, self._head.weight):
            # Once for both matmuls, because the gradient is as large as the logits.
            grad = grad.to(rows.dtype)
        if self.hidden is not None:
            of_rows = to_hidden(grad, self._head.weight, rows)
            if idle is not None:  # 0 times an infinite weight of the head is NaN
                of_rows.masked_fill_(idle, 0)
            own.chunk.put(self.hidden, of_rows)
        if self._needs_weight:
            self.weight = to_weight(self.weight, grad, rows[:tokens], self._head.weight)

    def tensors(self) -> list[Tensor | None]:
        """The gradients of hidden states, weight and bias; None if not needed."""
        if self._needs_weight and self.weight is None:
            like = self._head.weight  # may have any strides; the gradient is contiguous
            self.weight = like.new_zeros(like.shape, dtype=self._dtype)
        return [self.hidden, self.weight, self.bias]


BLOCK = 8192
"""Rows of the weight that are converted at a time. With hidden size 512 and 2,048 rows, the
conversions take as long as the matmuls of 128 tokens. With 8,192 and 16,384 rows they take a fifth
of that (one process, two cores, torch 2.13)."""


def logits_of(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out`` [n, V] = ``rows`` [n, D] @ ``weight`` [V, D].T."""
    if _is_wide_product(rows, weight):
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
        return
    # A matmul of bf16 alone would round the logits to bf16.
    own = rows.to(out.dtype)
    for words, block in _blocks(weight, out.dtype):
        torch.mm(own, block.t(), out=out[:, words])


def to_hidden(grad: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """[n, D] = ``grad`` [n, V] @ ``weight`` [V, D]. ``like`` has the dtype of the hidden states."""
    if _rounds_gradients(like, weight):
        return torch.mm(grad.to(weight.dtype), weight, out_dtype=torch.float32)
    if weight.dtype == grad.dtype:
        return grad @ weight
    total = grad.new_zeros(grad.shape[0], weight.shape[1])
    for words, block in _blocks(weight, grad.dtype):
        total.addmm_(grad[:, words], block)
    return total


def to_weight(total: Tensor | None, grad: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """``total`` [V, D] + ``grad`` [n, V].T @ ``rows`` [n, D], in the memory of ``total`` if it is
    not None. ``weight`` has the shape of the gradient.
    """
    if _rounds_gradients(rows, weight):
        own = grad.to(rows.dtype).t()
        if total is None:
            return torch.mm(own, rows, out_dtype=torch.float32)
        # addmm_ has no out_dtype.
        return torch.addmm(total, own, rows, out_dtype=torch.float32, out=total)
    rows = rows.to(grad.dtype)
    return torch.mm(grad.t(), rows) if total is None else total.addmm_(grad.t(), rows)


def _is_wide_product(rows: Tensor, weight: Tensor) -> bool:
    """True if torch has a matmul of these tensors with fp32 results."""
    is_low = rows.dtype == weight.dtype in (torch.bfloat16, torch.float16)
    return is_low and DEVICES[rows.device.type].has_wide_product


def _rounds_gradients(rows: Tensor, weight: Tensor) -> bool:
    """True if gradients are rounded for such a matmul. In fp16 small ones would underflow."""
    return rows.dtype == torch.bfloat16 and _is_wide_product(rows, weight)


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in a dtype: unchanged, or ``BLOCK`` rows at a time."""
    if weight.dtype == dtype:
        yield slice(None), weight
        return
    for first in range(0, weight.shape[0], BLOCK):
        words = slice(first, first + BLOCK)
        yield words, weight[words].to(dtype)


breaks_graphs = context.not_compiled("it walks over the batch in Python, a chunk at a time")
