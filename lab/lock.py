"""One process at a time in an output folder.

The lock is the operating system's (``flock``) on the file ``.lock`` in the folder. It ends with the
process that holds it, also under ``kill -9``; a file that is left behind locks nothing. The file
names its holder, for the error that the next process gets.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.settings import CompareError

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def locked(out: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Holds the folder for this process.

    On a system or file system without locks, ``warn`` is called with a sentence that says so, and
    the folder is not held. A network file system may keep its locks to each host.

    Raises:
        CompareError: another process holds the folder; the text names it.
    """
    path = out / LOCK
    handle = _open_locked(path, out)
    if handle is None:
        warn(f"{out} cannot be locked here: nothing keeps a second run out of it.")
        yield
        return
    try:
        os.ftruncate(handle, 0)
        os.write(handle, _holder().encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_UN)  # children that were forked share the lock
        os.close(handle)


def _open_locked(path: Path, out: Path) -> int | None:
    """A descriptor of the locked file; None where there are no locks."""
    if sys.platform == "win32":
        return None
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_at(path, handle):
                return handle
        except BlockingIOError:
            holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise CompareError(
                f"{out} is in use by {holder}; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in _UNSUPPORTED:
                raise
            path.unlink(missing_ok=True)
            return None
        os.close(handle)  # its last holder has removed it meanwhile


def _is_still_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder() -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}"
