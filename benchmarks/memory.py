"""The most memory that a call holds at once above its inputs, on a CPU.

Resident memory belongs to a whole process, so each candidate is called in its own process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.candidates import COMPILE, build_candidates, candidate
from benchmarks.cases import Case, make_inputs, shape_text
from benchmarks.rivals import LIBRARIES
from benchmarks.suites import OPS

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
