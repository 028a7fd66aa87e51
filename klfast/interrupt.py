"""Ctrl-C while a command imports torch, which takes seconds: it ends without a traceback.

Python imports the package before ``klfast.__main__``, so the package begins with this, which
imports next to nothing. A program of somebody else's that imports klfast keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType


def is_command() -> bool:
    """Whether this process is ``klfast ...`` or ``python -m klfast ...``.

    While Python imports the package of a module that it was given, that module is called ``-m``.
    """
    name = sys.argv[0] if sys.argv else ""
    if name == "-m":
        given = f" {' '.join(sys.orig_argv)} "
        return " -m klfast " in given or " -mklfast " in given
    return os.path.splitext(os.path.basename(name))[0] == "klfast"


def hide_interrupts() -> None:
    """Print no traceback of an interrupt; Python ends with the status of one all the same."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, traceback)

    sys.excepthook = hook


if is_command():
    hide_interrupts()
