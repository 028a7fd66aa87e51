"""Standard output and error of the commands, which end no command.

A character that the stream's encoding lacks is written as ``?``. Text written after the reader has
closed its end of a pipe (``| head``), or to a stream that was closed from the start, is dropped:
the command runs on, and its files and its exit code are as without a pipe. Other errors, such as a
full disk behind the stream, are raised.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def replace_standard_streams() -> None:
    """Replaces ``sys.stdout`` and ``sys.stderr``, unless someone else already has."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open to the end
        elif stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _lenient(stream))


def _lenient(stream: TextIO) -> TextIO:
    assert isinstance(stream, io.TextIOWrapper)
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Pipe(io.FileIO):
    """A file whose reader may leave before the writer."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes
