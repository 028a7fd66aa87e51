"""Functions that torch.compile leaves as they are: the graph breaks at a call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def breaks_graphs(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator as ``torch.compiler.disable``, which would import all of dynamo.

    Args:
        reason: why, for the error under ``fullgraph=True``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def served(*args: P.args, **kwargs: P.kwargs) -> R:
            if "torch._dynamo" not in sys.modules:  # which a program that compiles has imported
                return function(*args, **kwargs)
            return cast(R, _outside(function)(*args, **kwargs))

        # What dynamo looks at before it traces a function.
        served._torchdynamo_disable = True  # type: ignore[attr-defined]
        served._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return served

    return decorate


_disabled: dict[Callable[..., Any], Callable[..., Any]] = {}


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _disabled:
        _disabled[function] = sys.modules["torch._dynamo"].disable(function)
    return _disabled[function]
