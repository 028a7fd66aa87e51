"""Functions that torch.compile leaves as they are: the graph breaks at a call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

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
