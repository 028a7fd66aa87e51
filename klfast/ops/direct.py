"""The direct road: ops as plain functions of the extension, 10 us a call cheaper than torch's
dispatcher, for plain tensors in eager mode.

Plain is an exact ``torch.Tensor`` or ``Parameter`` in memory that holds its values (no negated
view, no zero tensor), outside torch.func, torch.jit.trace, torch-function and dispatch modes, and
the profiler, which shows ops by name. All else takes the dispatcher's road, to the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from klfast.ops.table import Ops


class NotPlainError(Exception):
    """Only the dispatcher serves these tensors."""


class Functions(Protocol):
    """The extension: a function for each name in ``Ops._fields``, which returns NotImplemented for
    what is not plain. Outputs that are not wanted are None.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]: ...


class Direct(NamedTuple):
    """The direct road of a backend."""

    functions: Functions
    ops: Ops
    """The ops, on the direct road where that serves."""
    serves: Callable[[object], bool]
    """Whether the kernels are known to run where a tensor is, and do all checks of values that are
    to be done there.
    """


def directly(functions: Functions, dispatched: Ops) -> Ops:
    """The ops by ``functions``; by torch's dispatcher what is not plain, and under torch.compile.

    Outputs that are not wanted may be None.
    """
    named = (getattr(functions, name) for name in Ops._fields)
    return Ops(*map(_directly, named, dispatched))


def _directly(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    def direct(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*args)
        outputs = function(*args)
        return op(*args) if outputs is NotImplemented else outputs

    return direct
