"""Finds the caller whose line a warning names."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

_PACKAGE = __name__.partition(".")[0]
_INTERNAL = f"{_PACKAGE}.compat"


class Caller(NamedTuple):
    """The first function on the stack that is neither klfast's nor torch's."""

    stacklevel: int  # the stacklevel for warnings.warn in the function that asks for the caller
    is_internal: bool  # True if klfast itself made the call


def caller() -> Caller:
    """The caller of klfast."""
    # warnings.warn counts frames, and decorators of torch, such as no_grad, add some.
    frame: FrameType | None = sys._getframe(1)
    depth, is_internal = 1, False
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in (_PACKAGE, "torch"):
            break
        is_internal = is_internal or module.startswith(_INTERNAL)
        frame = frame.f_back
        depth += 1
    return Caller(depth, is_internal)
