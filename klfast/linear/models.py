"""What a model makes of a chunk, and what flows back to it.

Shapes: R tokens of width D, of which a chunk has n; V words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from klfast.linear.call import Model
from klfast.linear.chunks import Chunk
from klfast.linear.products import logits_of, to_hidden, to_weight


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
            grad *= slope_of(self.logits(), cap)
        return grad


def slope_of(logits: Tensor, softcap: float) -> Tensor:
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
