"""Whose line a warning names."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

_PACKAGE = __name__.partition(".")[0]
_INTERNAL = f"{_PACKAGE}.compat"


class Caller(NamedTuple):
    """The first function on the stack that is neither klfast's nor torch's."""

    stacklevel: int
    """As ``warnings.warn`` takes it in the function that asks for the caller."""
    is_internal: bool
    """Whether klfast made the call for a purpose of its own."""


def caller() -> Caller:
    """Who called klfast. torch stands between for what it decorates, such as by ``no_grad``."""
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
