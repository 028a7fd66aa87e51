"""The three products of hidden states, weights and gradients of logits.

Shapes: n tokens of width D, V words. Logits and their gradients are in the arithmetic's dtype,
fp32 or fp64, and so are all sums.

=================== ================================================================================
dtypes              how
=================== ================================================================================
all arithmetic's    torch's product
both bf16, CUDA     torch's product of bf16 with fp32 results (``out_dtype``); gradients are rounded
                    to bf16 before they meet it
all else            torch's product in the arithmetic's dtype, of ``BLOCK`` words of the weight at a
                    time, so that no copy of it is held
=================== ================================================================================

fp16 gradients are never rounded to fp16: those of a mean underflow.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

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
