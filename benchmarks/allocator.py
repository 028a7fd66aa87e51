"""The treatment of freed memory by malloc, and the page faults that show it."""

from __future__ import annotations

import ctypes
import mmap
import resource

import torch
from torch import Tensor

LARGE_BLOCK = 32 << 20
"""Bytes. A larger block is a mapping of its own to glibc's malloc, given back when it is freed."""

KEPT = "kept by the process"
GIVEN_BACK = "left to malloc, which gives large blocks back to the system"

# glibc's numbers of mallopt's parameters.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4

_TRIAL_BYTES = 2 * LARGE_BLOCK
_TRIALS = 8
_LARGE_PAGE = 2 << 20


class NotKept(Exception):  # noqa: N818  # said in the words of the message
    """Freed memory cannot be kept here; its text is the whole message."""


def keep_memory() -> None:
    """Makes malloc keep freed memory for the rest of the process.

    No block gets a mapping of its own, and the heap never shrinks. glibc's ``M_MMAP_THRESHOLD``
    would not do: it takes no more than 32 MiB.

    Raises:
        NotKept: malloc is not glibc's.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        raise NotKept("--keep-memory needs glibc: this system's C library has no mallopt")
    done = [libc.mallopt(_M_MMAP_MAX, 0), libc.mallopt(_M_TRIM_THRESHOLD, -1)]
    if not all(done) or not _keeps():
        raise NotKept("--keep-memory needs glibc's malloc, and another allocator is in its place")


def _keeps() -> bool:
    """True if a large freed block can be allocated again without page faults.

    The check tries several times. An aligned block needs room around it, and small ones take the
    first remainders.
    """
    for _ in range(_TRIALS):
        before = page_faults()
        torch.ones(_TRIAL_BYTES, dtype=torch.uint8)
        if page_faults() - before < _TRIAL_BYTES // mmap.PAGESIZE // 8:
            return True
    return False


def page_faults() -> int:
    """The page faults of the process so far, without a disk's."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def prefer_large_pages(tensor: Tensor) -> Tensor:
    """Asks for large pages behind a new tensor, as klfast's CPU kernels do for gradients of more
    than ``LARGE_BLOCK``; where the system has no such request nothing happens.
    """
    if tensor.nbytes > LARGE_BLOCK and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-tensor.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
        end = (tensor.data_ptr() + tensor.nbytes) // _LARGE_PAGE * _LARGE_PAGE
        size = ctypes.c_size_t(end - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, mmap.MADV_HUGEPAGE)
    return tensor
