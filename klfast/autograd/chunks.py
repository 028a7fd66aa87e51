"""Chunks of tokens: which tokens, what a model makes of them, and what flows back.

Shapes: R tokens of width D, of which a chunk has n; V words. Logits and their gradients are in the
arithmetic's dtype, fp32 or fp64, and so are all sums of the three matmuls:

=================== ================================================================================
dtypes              how
=================== ================================================================================
all arithmetic's    torch's matmul
both bf16, CUDA     torch's matmul of bf16 with fp32 results (``out_dtype``); gradients are rounded
                    to bf16 before they meet it
all else            torch's matmul in the arithmetic's dtype, of ``BLOCK`` words of the weight at a
                    time, so that no copy of it is held
=================== ================================================================================

fp16 gradients are never rounded to fp16: those of a mean underflow.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from klfast.args.rows import Model

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
    """The rows of the matmuls, >= n: those behind n are of no token."""
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


class ChunkOfModel:
    """A model's hidden states and logits of one chunk.

    Args:
        model: whose.
        chunk: the tokens.
        memory: [>= size, V], where the logits are made.
    """

    def __init__(self, model: Model, chunk: Chunk, memory: Tensor) -> None:
        self.head, self.chunk = model.head, chunk
        self.rows = chunk.rows(model.hidden)
        self._all = memory[: chunk.size]
        logits_of(self.rows, self.head.weight, self._all)
        if self.head.bias is not None:
            self._all += self.head.bias
        if (cap := self.head.softcap) is not None:
            self._all.div_(cap).tanh_().mul_(cap)

    def logits(self) -> Tensor:
        """[1, n, V], as the ops take them."""
        return self._all[None, : self.chunk.tokens]

    def before_softcap(self, grad: Tensor) -> Tensor:
        """The gradient of the logits before the softcap, in place: [1, n, V] of those behind it."""
        if (cap := self.head.softcap) is not None:
            grad *= softcap_derivative(self.logits(), cap)
        return grad


def softcap_derivative(logits: Tensor, softcap: float) -> Tensor:
    """The derivative of c tanh(z / c) by z, of the capped logits: 1 - (logits / c)^2."""
    return 1 - (logits / softcap).square_()


class Gradients:
    """The gradients of a model's hidden states, weight and bias, summed over chunks.

    Args:
        model: whose.
        needs: which of the three are needed.
        dtype: of the sums; they are rounded to their own dtype once, when they are handed out.
    """

    def __init__(self, model: Model, needs: Sequence[bool], dtype: torch.dtype) -> None:
        self._head, self._dtype = model.head, dtype
        self._needs_weight = needs[1]
        of_hidden, _, of_bias = zip(model.tensors(), needs, strict=True)
        self.hidden, self.bias = (
            t.new_zeros(t.shape, dtype=dtype) if t is not None and need else None
            for t, need in (of_hidden, of_bias)
        )
        self.weight: Tensor | None = None
        """None until the first chunk: zeros would be written for nothing."""

    def add(self, own: ChunkOfModel, grad: Tensor) -> None:
        """Add what a gradient of the logits [1, n, V] brings; its memory may be changed."""
        tokens = own.chunk.tokens
        rows, grad = own.rows, own.before_softcap(grad)[0]
        if self.hidden is not None:
            own.chunk.put_rows(self.hidden, to_hidden(grad, self._head.weight, rows))
        if self._needs_weight:
            self.weight = to_weight(self.weight, grad, rows[:tokens], self._head.weight)
        if self.bias is not None:
            self.bias += grad.sum(0)

    def tensors(self) -> list[Tensor | None]:
        """Of hidden states, weight and bias; None where not needed."""
        if self._needs_weight and self.weight is None:
            like = self._head.weight  # of any strides; the gradient is contiguous
            self.weight = like.new_zeros(like.shape, dtype=self._dtype)
        return [self.hidden, self.weight, self.bias]


BLOCK = 8192
"""Words that are converted at a time. At 2,048 rows of 512 the conversions take as long as the
products of 128 tokens, at 8,192 and 16,384 a fifth (one process, two cores, torch 2.13)."""


def logits_of(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out`` [n, V] = ``rows`` [n, D] @ ``weight`` [V, D].T."""
    if _is_wide_product(rows, weight):
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
        return
    own = rows.to(out.dtype)
    for words, block in _blocks(weight, out.dtype):
        torch.mm(own, block.t(), out=out[:, words])


def to_hidden(grad: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """[n, D] = ``grad`` [n, V] @ ``weight`` [V, D]. ``like`` has the dtype of the hidden states."""
    if _is_wide_product(like, weight):
        return torch.mm(grad.to(weight.dtype), weight, out_dtype=grad.dtype)
    if weight.dtype == grad.dtype:
        return grad @ weight
    total = grad.new_zeros(grad.shape[0], weight.shape[1])
    for words, block in _blocks(weight, grad.dtype):
        total.addmm_(grad[:, words], block)
    return total


def to_weight(total: Tensor | None, grad: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """``total`` [V, D] + ``grad`` [n, V].T @ ``rows`` [n, D], in the memory of ``total`` where that
    is not None. ``weight`` is of the gradient's shape.
    """
    is_wide = _is_wide_product(rows, weight)
    if is_wide:
        own = grad.to(rows.dtype).t()
        if total is None:
            return torch.mm(own, rows, out_dtype=grad.dtype)
        return torch.addmm(total, own, rows, out_dtype=grad.dtype, out=total)
    rows = rows.to(grad.dtype)
    return torch.mm(grad.t(), rows) if total is None else total.addmm_(grad.t(), rows)


def _is_wide_product(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies these with results in fp32."""
    return rows.is_cuda and rows.dtype == weight.dtype == torch.bfloat16


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in a dtype: as it is, or ``BLOCK`` words at a time."""
    if weight.dtype == dtype:
        yield slice(None), weight
        return
    for first in range(0, weight.shape[0], BLOCK):
        words = slice(first, first + BLOCK)
        yield words, weight[words].to(dtype)


# torch.compile leaves these functions as they are: the graph breaks at a call.

P = ParamSpec("P")
R = TypeVar("R")

_REASON = "it walks over the batch in Python, a chunk at a time"


def breaks_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """As ``torch.compiler.disable``, which would import all of dynamo, once that is imported."""

    @functools.wraps(function)
    def served(*args: P.args, **kwargs: P.kwargs) -> R:
        own = function if "torch._dynamo" not in sys.modules else _disabled(function)
        return own(*args, **kwargs)

    # What dynamo looks at before it traces a function.
    served._torchdynamo_disable = True  # type: ignore[attr-defined]
    served._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return served


_known: dict[Callable[..., Any], Callable[..., Any]] = {}


def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _known:
        _known[function] = torch.compiler.disable(  # type: ignore[no-untyped-call]
            function, reason=_REASON
        )
    return _known[function]
