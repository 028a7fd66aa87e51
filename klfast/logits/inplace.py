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
    reason = None
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        reason = "cannot be used under torch.compile or torch.func"
    elif logits.is_leaf and logits.requires_grad:
        reason = (
            "needs logits that a model has computed: it would overwrite a leaf, whose values "
            "autograd hands to the optimizer"
        )
    elif not logits.is_contiguous():
        reason = f"needs contiguous logits, got strides {tuple(logits.stride())}"
    if reason is not None:
        raise ValueError(f"inplace_backward=True {reason}")
