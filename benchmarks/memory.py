"""Memory on a CPU: what malloc does with freed memory, page faults, and the peak of a call.

A peak is the most memory that a call holds at once above its inputs. Resident memory belongs to a
whole process, so each candidate is called in its own process.
"""

import ctypes
import gc
import mmap
import os
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.candidates import COMPILE, build_candidates, candidate
from benchmarks.cases import Case, make_inputs, shape_text
from benchmarks.rivals import LIBRARIES
from benchmarks.suites import OPS

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


SMALLEST_INPUTS = 32 << 20
"""Below this the peak is the allocator's business: it keeps what was freed."""

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_bytes(case: Case, name: str) -> int | None:
    """The peak of a candidate's call, named as in ``build_candidates`` or by its library; None for
    small inputs, and with a warning where it cannot be known.
    """
    if case.input_bytes < SMALLEST_INPUTS:
        return None
    arguments = [case.op.name, case.dtype, shape_text(case.shape), name]
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks.memory import main; main()", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return int(done.stdout.split()[-1])
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    warnings.warn(f"no peak memory of {name} is known: {reason}", stacklevel=2)
    return None


def main() -> None:
    op, dtype, shape, name = sys.argv[1:]
    case = Case(OPS[op], dtype, tuple(map(int, shape.split("x"))))
    inputs = make_inputs(case, 1)[0]
    if name in LIBRARIES:
        call = candidate(case.op, LIBRARIES[name]()[op])
    else:
        call = build_candidates(case.op, with_compile=name == COMPILE)[name]
    print(peak_of(lambda: call(inputs)))


def peak_of(call: Callable[[], Any]) -> int:
    """The peak of a second call, after the first call has made its one-time allocations.

    Raises:
        OSError: the system does not report it; Linux does.
    """
    call()
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # or what the first call has freed would hide what the second takes
    _RESET.write_text("5")
    before = _resident("VmRSS")
    kept = call()
    peak = _resident("VmHWM") - before
    del kept
    return peak


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{_STATUS} has no {name}")
    return int(found[1]) << 10
