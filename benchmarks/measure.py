"""One case from inputs to rows: make the inputs, check every candidate, time all of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import idle
from benchmarks.bandwidth import FILLS, PROBES, fastest, read_and_fill
from benchmarks.candidates import COMPILE, KLFAST, Candidate, build_candidates, is_ours
from benchmarks.cases import Case, Inputs, Op, make_inputs
from benchmarks.check import WrongResult, check_outputs, tolerances, truth
from benchmarks.memory import peak_bytes
from benchmarks.rivals import LIBRARIES
from benchmarks.timing import Timing, interleave, is_noisy
from klfast.selfcheck.clock import rotation

ROUNDS = 20

READ = "read"
"""The plain read of the inputs, among the candidates."""

FLOOR = "read + fill"
"""The plain read and a fill of the gradient, among the candidates that have a backward."""

PRODUCTS = "products"
"""The bare products of the hidden states, in their place."""

ATTEMPTS = 3
"""Rounds that met a load are repeated so often where the result is to be published."""

SMALLEST_READ = 1 << 20
"""Below this a read measures the call, not the memory."""

_SPARE_BYTES = 1 << 30


class Skip(Exception):  # noqa: N818  # not an error: the case is left out, visibly
    """Why a case cannot be measured here."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate of one case.

    Attributes:
        case: name of the case.
        op, dtype, shape: the case.
        impl: ``klfast`` or a backend of it, ``eager``, ``selective``, a key of ``MODES``, a library
            of ``rivals``, ``read``, ``read + fill``, ``products``, ``copy``, or what the op has
            beside.
        ratio: this candidate's median over that of klfast (of its first backend): how many times
            faster klfast is. None for plain reads, fills and copies.
        rounds: how many timings.
        bytes: the least that must move.
        gb_per_s: ``bytes`` over the median, in 1e9 bytes per second.
        read_share: ``gb_per_s`` as a share of that of a plain read: on a CPU in the same rounds, on
            a GPU the ceiling's.
        peak_bytes: memory above the inputs; on a CPU resident memory, in a process of its own, None
            where that was not measured.
    """

    case: str
    op: str
    dtype: str
    shape: list[int]
    impl: str
    ratio: float | None
    rounds: int
    bytes: int
    gb_per_s: float | None
    read_share: float | None
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class CpuRow(Row):
    """On a CPU. ``gb_per_s`` and what follows from it are None where no read is timed: the inputs
    are so small that the call is measured, not the memory, or products take the time.

    Attributes:
        median_ms, min_ms: of a call, over the rounds.
        calls: in each timing.
        floor_ratio: this candidate's median over that of ``read + fill``, without a backward of
            ``read``, or of ``products``.
        page_faults: of a call, the median over the rounds: 0 in memory that the process has kept.
    """

    median_ms: float
    min_ms: float
    calls: int
    floor_ratio: float | None
    page_faults: float | None

    @property
    def is_noisy(self) -> bool:
        """Whether its median is not to be relied on."""
        return is_noisy(self.median_ms, self.min_ms)


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        rounds: of each case.
        reused: one set of inputs, in cache from an untimed call before each timing; otherwise sets
            that rotate.
        with_compile: whether ``torch.compile`` is among the rivals.
        with_memory: whether the peaks of memory are measured.
        keeps_memory: whether the process keeps what is freed (``allocator.keep_memory``).
        attempts: how often rounds are repeated that met a load.
    """

    rounds: int = ROUNDS
    reused: bool = False
    with_compile: bool = True
    with_memory: bool = False
    keeps_memory: bool = False
    attempts: int = 1


class Measured(NamedTuple):
    """A case's rows, klfast first; the plain read, and fill, behind its ``read``; and the load of
    its rounds, None where it is not known.
    """

    rows: Sequence[Any]
    probe: str | None
    load: idle.Load | None = None


def measure(case: Case, plan: Plan) -> Measured:
    """Checks and times a case.

    Raises:
        Skip: the case does not fit into memory.
        WrongResult: a candidate computes something else.
    """
    timed = _time(case, plan)
    peaks = {}
    if plan.with_memory:  # now that this process holds no inputs any more
        peaks = {name: peak_bytes(case, name) for name in timed.candidates}
    return Measured(rows_of(case, timed.timings, peaks), timed.probe, timed.load)


class _Timed(NamedTuple):
    """``candidates``: the names of those in ``timings`` that were checked."""

    timings: dict[str, Timing]
    candidates: list[str]
    probe: str | None
    load: idle.Load | None


def _time(case: Case, plan: Plan) -> _Timed:
    copies = 1 if plan.reused else rotation(case.input_bytes)
    check_memory(case, copies)
    inputs = make_inputs(case, copies)
    candidates = checked_candidates(case.op, inputs[0], plan.with_compile)
    plain, probe = _plain(case, inputs, plan)
    everyone = {**candidates, **case.op.beside(inputs[0]), **plain}
    timings, load = time_idle(everyone, inputs, plan)
    return _Timed(timings, list(candidates), probe, load)


def _plain(
    case: Case, inputs: Sequence[Inputs], plan: Plan
) -> tuple[dict[str, Candidate], str | None]:
    """``READ`` and, with a backward, ``FLOOR``, or ``PRODUCTS``, and what is behind them; nothing
    for small inputs, where a read is a call.
    """
    if case.input_bytes < SMALLEST_READ:
        return {}, None
    floors = case.op.floors()
    if floors is not None:
        floor = fastest(floors, inputs, warm=plan.reused, settle=plan.keeps_memory)
        return {PRODUCTS: floors[floor]}, floor
    probe = fastest(PROBES, inputs, warm=plan.reused)
    if not case.op.backward:
        return {READ: PROBES[probe]}, probe
    fill = fastest(FILLS, inputs, warm=plan.reused, settle=plan.keeps_memory)
    return {READ: PROBES[probe], FLOOR: read_and_fill(probe, fill)}, f"{probe}; {fill}"


def time_idle(
    candidates: Mapping[str, Candidate], inputs: Sequence[Any], plan: Plan
) -> tuple[dict[str, Timing], idle.Load | None]:
    """Timings and the load beside them, of the first attempt that the machine was idle in, or of
    the last.
    """
    for attempt in range(1, plan.attempts + 1):
        begin = idle.reading()
        timings = interleave(
            candidates,
            inputs,
            plan.rounds,
            warm=plan.reused,
            settle=plan.keeps_memory,
        )
        load = idle.since(begin)
        if load is None or load.is_idle or attempt == plan.attempts:
            return timings, load
    raise ValueError(f"attempts must be at least 1, got {plan.attempts}")


def checked_candidates(op: Op, inputs: Inputs, with_compile: bool) -> dict[str, Candidate]:
    """The candidates, each called once and found right."""
    return check_candidates(build_candidates(op, with_compile), op, inputs)


def check_candidates(
    candidates: dict[str, Candidate],
    op: Op,
    inputs: Inputs,
    failed: dict[str, str] | None = None,
) -> dict[str, Candidate]:
    """Calls each candidate once, and returns those that are right.

    One that may fail is left out with a warning. So is any other that goes wrong, if there is a
    ``failed`` (name -> why) to say so in.
    """
    expected = truth(op, inputs)
    allowed = tolerances(op, inputs, expected)
    working = {}
    for name, call in candidates.items():
        try:
            check_outputs(name, op, call(inputs), expected, allowed)
        except Exception as error:
            if _may_fail(name, error):
                warnings.warn(
                    f"{name} is left out, as it fails here: {one_line(error)}", stacklevel=2
                )
            elif failed is None:
                raise
            else:
                failed[name] = one_line(error)
        else:
            working[name] = call
    return working


def _may_fail(name: str, error: Exception) -> bool:
    """Whether it is no mistake of klfast's or of its benchmark's: ``torch.compile`` needs a
    compiler, other libraries a device or a version, and eager formulas more memory than there is.
    """
    if is_ours(name) or isinstance(error, WrongResult):
        return False
    return name.startswith((COMPILE, *LIBRARIES)) or isinstance(error, torch.OutOfMemoryError)


def one_line(error: Exception) -> str:
    """An error's type and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def rows_of(
    case: Case, timings: Mapping[str, Timing], peaks: Mapping[str, int | None] | None = None
) -> list[CpuRow]:
    return [_row(case, name, timings, (peaks or {}).get(name)) for name in timings]


def _row(case: Case, name: str, timings: Mapping[str, Timing], peak: int | None) -> CpuRow:
    timing = timings[name]
    read = timings.get(READ)
    floor = timings.get(FLOOR, timings.get(PRODUCTS, read))
    plain_bytes = {READ: case.input_bytes, FLOOR: case.input_bytes + case.gradient_bytes}
    moved = plain_bytes.get(name, case.least_bytes)
    read_speed = None if read is None else case.input_bytes / read.median
    speed = None if read is None else moved / timing.median
    return CpuRow(
        case=case.name,
        op=case.op.name,
        dtype=case.dtype,
        shape=list(case.shape),
        impl=name,
        median_ms=timing.median * 1e3,
        min_ms=timing.best * 1e3,
        ratio=None if name in plain_bytes else timing.median / timings[KLFAST].median,
        rounds=len(timing.seconds),
        calls=timing.calls,
        bytes=moved,
        gb_per_s=None if speed is None else speed / 1e9,
        read_share=None if speed is None or read_speed is None else speed / read_speed,
        floor_ratio=None if floor is None else timing.median / floor.median,
        page_faults=timing.median_faults,
        peak_bytes=peak,
    )


def check_memory(case: Case, copies: int) -> None:
    """Raises :class:`Skip` if the inputs and eager's temporaries would not fit."""
    needed = copies * case.input_bytes + case.op.working_bytes * case.numbers + _SPARE_BYTES
    free = available_memory()
    if free is not None and needed > free:
        raise Skip(f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free")


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line), None)
