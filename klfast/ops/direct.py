"""The direct road: ops as plain functions of the extension, for plain tensors in eager mode.

Plain is an exact ``torch.Tensor`` or ``Parameter`` in memory that holds its values (no negated
view, no zero tensor), outside torch.func, torch.jit.trace, torch-function and dispatch modes, and
this thread's profiler, which shows ops by name. All else takes the dispatcher's road, to the same
kernels. On [4, 64] torch's dispatcher takes 10 us of an op's 13 (torch 2.13, Intel Xeon).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from klfast.ops.table import Ops


class NotPlainError(Exception):
    """Only the dispatcher serves these tensors."""


class Functions(Protocol):
    """The extension: a function for each name in ``Ops._fields``, which returns NotImplemented for
    what is not plain, and where the op raises an error.

    What is not wanted of ``kl_penalty_fwd``, and gradients that are not wanted, are None.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]: ...


class Direct(NamedTuple):
    """The direct road of a backend."""

    functions: Functions
    ops: Ops
    """The ops, on the direct road where that serves."""
    serves: Callable[[Tensor], bool]
    """True where a call on a tensor's device needs nothing before ``functions``: the kernels are
    known to run there, and check the values that are to be checked.
    """


def directly(functions: Functions, dispatched: Ops) -> Ops:
    """The ops by ``functions``; what these decline, and under torch.compile, by the dispatcher."""
    roads = ((getattr(functions, name), getattr(dispatched, name)) for name in Ops._fields)
    return Ops(*(_directly(*pair) for pair in roads))


def _directly(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    def direct(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*args)
        outputs = function(*args)
        return op(*args) if outputs is NotImplemented else outputs

    return direct
