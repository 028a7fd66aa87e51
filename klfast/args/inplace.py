"""Checks for a gradient that is written over the logits."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

SERVES_ONE_BACKWARD = (
    "inplace_backward must be False for a second backward or create_graph, got True: the first "
    "backward has put the gradient in the memory of logits"
)


_NEAR = 64


def check_inplace(logits: Tensor) -> None:
    """Raise ValueError if a gradient must not be written over the logits."""
    if (reason := why_not_inplace(logits)) is not None:
        raise ValueError(f"inplace_backward=True {reason}")


def why_not_inplace(logits: Tensor) -> str | None:
    """The reason not to write a gradient over the logits; None if there is none."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "cannot be used under torch.compile or torch.func"
    memory_of = logits if logits._base is None else logits._base
    if (memory_of.is_leaf and memory_of.requires_grad) or _is_leaf_passed_on(memory_of):
        return (
            "needs logits that a model has computed: it would overwrite a leaf, whose values "
            "autograd hands to the optimizer"
        )
    if not logits.is_contiguous():
        return f"needs contiguous logits, got strides {tuple(logits.stride())}"
    if logits.is_neg():
        return "needs logits whose memory holds their values, got a negated view"
    return None


def _is_leaf_passed_on(logits: Tensor) -> bool:
    """True if logits share the memory of a leaf that a Python Function has returned detached.

    Autograd sees a new result there, not a view. The search ends after ``_NEAR`` nodes, because a
    longer graph is a model, whose logits are computed.
    """
    maker: Any = logits.grad_fn
    if not isinstance(maker, BackwardCFunction):
        return False
    memory = logits.untyped_storage()._cdata
    nodes: list[Any] = [maker]
    for node in itertools.islice(nodes, _NEAR):  # the loop appends to nodes
        leaf = getattr(node, "variable", None)  # AccumulateGrad nodes have it
        if (
            isinstance(leaf, Tensor)
            and leaf.layout == torch.strided
            and leaf.untyped_storage()._cdata == memory
        ):
            return True
        nodes += [following for following, _ in node.next_functions if following is not None]
    return False
