"""A gradient in the memory of the logits: what forbids it, and how often it serves."""

from __future__ import annotations

import torch
from torch import Tensor

SERVES_ONE_BACKWARD = (
    "inplace_backward=True serves one backward, which leaves the gradient in the memory of logits; "
    "for a second one, or create_graph, call without it"
)


def check_inplace(logits: Tensor) -> None:
    """Raise ValueError where a gradient must not be written over the logits."""
    if (reason := why_not_inplace(logits)) is not None:
        raise ValueError(f"inplace_backward=True {reason}")


def why_not_inplace(logits: Tensor) -> str | None:
    """What forbids to write a gradient over the logits; None if nothing does."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "cannot be used under torch.compile or torch.func"
    memory_of = logits if logits._base is None else logits._base
    if memory_of.is_leaf and memory_of.requires_grad:
        return (
            "needs logits that a model has computed: it would overwrite a leaf, whose values "
            "autograd hands to the optimizer"
        )
    if not logits.is_contiguous():
        return f"needs contiguous logits, got strides {tuple(logits.stride())}"
    return None
