"""One case from inputs to rows: make the inputs, check every candidate, time all of them.

``measure`` does so on a CPU, ``GpuBench.measure`` on a GPU. Plain reads of the inputs' own bytes by
torch's reductions, and plain fills of the gradient's, say how fast the memory is.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import candidates, idle, rivals, timing
from benchmarks.candidates import AUTOTUNED, Candidate
from benchmarks.cases import Case, Inputs, Op, make_inputs
from benchmarks.logits import LogitsOp
from benchmarks.memory import peak_bytes, prefer_large_pages
from benchmarks.timing import Call
from klfast import backends
from klfast.types.names import BackendName

ROUNDS = 20

READ = "read"  # the plain read of the inputs, among the candidates

FLOOR = "read + fill"
"""The plain read and a fill of the gradient, among the candidates that have a backward."""

PRODUCTS = "products"  # the bare matmuls of the hidden states, which replace both of the above
ATTEMPTS = 3  # how often rounds on a loaded machine are repeated if the result is to be published
SMALLEST_READ = 1 << 20  # below this a read measures the call, not the memory

_SPARE_BYTES = 1 << 30

COPY = "copy"  # the plain copy of the inputs, among a GPU's candidates, as ``READ`` is

KLFAST_BACKENDS: tuple[BackendName, ...] = ("native", "triton")

_CEILING_BYTES = 2 << 30
_CEILING_ROUNDS = 5
_AUTOTUNING_SECONDS = 5.0
"""A case whose share of the time left is less does without the autotuned rival."""


class Skip(Exception):  # noqa: N818  # not an error: the case is left out, visibly
    """Why a case cannot be measured here."""


Row = dict[str, Any]
"""One candidate of one case, as JSON has it.

- ``case``, ``op``, ``dtype``, ``shape``: the case.
- ``impl``: ``klfast`` or a backend of it, ``eager``, ``selective``, a key of ``MODES``, a library
  of ``rivals``, ``read``, ``read + fill``, ``products``, ``copy``, or what the op has beside.
- ``ratio``: this candidate's median over klfast's (its first backend's). It tells how many times
  faster klfast is. None for plain reads, fills and copies.
- ``rounds``: the number of timings.
- ``bytes``: the least that must move. ``gb_per_s`` is this over the median, in 1e9 bytes a second.
- ``read_share``: ``gb_per_s`` over a plain read's. On a CPU the read is timed in the same rounds.
  On a GPU it is the ceiling's.
- ``peak_bytes``: memory above the inputs. On a CPU it is resident memory, in a separate process.
  None if it was not measured.

On a CPU ``gb_per_s`` and the numbers that follow from it are None if no read is timed. Then the
inputs are so small that the call is measured and not the memory, or matmuls take the time.

- ``median_ms``, ``min_ms``: of a call, over the rounds.
- ``calls``: the number of calls in each timing.
- ``floor_ratio``: this candidate's median over the median of ``read + fill``. Without a backward it
  is over ``read``, and for matmuls over ``products``.
- ``page_faults``: of a call, the median over the rounds. It is 0 in memory that the process kept.

On a GPU:

- ``packed``: whether the case is.
- ``kernel_ms``, ``kernel_min_ms``: on the device with cold caches, over the rounds.
- ``graph_ms``: on the device in a CUDA graph, where inputs that fit stay in cache; None if it
  cannot be captured, or is too long for launches to matter.
- ``host_ms``: of the host, to queue a call.
"""


def is_noisy_row(row: Row) -> bool:
    median, least = (
        ("kernel_ms", "kernel_min_ms") if "kernel_ms" in row else ("median_ms", "min_ms")
    )
    return timing.is_noisy(row[median], row[least])


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        rounds: of each case.
        reused: one set of inputs, in cache from an untimed call before each timing; otherwise sets
            that rotate (CPU).
        with_compile: whether ``torch.compile`` is among the rivals.
        with_memory: whether the peaks of memory are measured (CPU; always on a GPU).
        keeps_memory: whether the process keeps freed memory (``memory.keep_memory``; CPU).
        attempts: how often rounds are repeated if the machine was loaded (CPU).
        budget: seconds for all cases; those that come too late are left out, visibly (GPU).
    """

    rounds: int = ROUNDS
    reused: bool = False
    with_compile: bool = True
    with_memory: bool = False
    keeps_memory: bool = False
    attempts: int = 1
    budget: float = 0.0


class Measured(NamedTuple):
    """The measurements of a case.

    They are its rows, klfast first, the plain read, and fill, behind its ``read``, and the load of
    its rounds (None if it is not known).
    """

    rows: Sequence[Row]
    probe: str | None
    load: idle.Load | None = None


Probe = Callable[[Inputs], Tensor]

TRIAL_ROUNDS = 5


def _probes(how: str, *dtypes: str) -> dict[str, Probe]:
    def of(dtype: str) -> Probe:
        return lambda inputs: getattr(inputs.block.view(getattr(torch, dtype)), how)()

    return {f"{how} of {dtype}": of(dtype) for dtype in dtypes}


# All on integers, as the bytes of a mask are denormal numbers to a float unit, and slow.
PROBES = _probes("sum", "int64") | _probes("amax", "int64", "int32", "int16", "uint8")
"""Reductions that torch splits over its threads and vectorises. Which is fastest differs by machine
and cache level. None is known to be at the roof: the fastest is an estimate of it from below."""

GPU_PROBES = PROBES | _probes("sum", "float32") | _probes("amax", "float32")
"""To a GPU, denormal numbers are like others."""


def _gradient(inputs: Inputs) -> Tensor:
    """Memory for it, as the run's state of memory has it."""
    return torch.empty_like(inputs.arguments[0], requires_grad=False)


FILLS: dict[str, Probe] = {
    "fill": lambda inputs: _gradient(inputs).fill_(1),
    "fill in large pages": lambda inputs: prefer_large_pages(_gradient(inputs)).fill_(1),
}
"""The gradient written, and nothing else. Its memory is fresh or reused as every candidate's is."""


def fastest(
    probes: Mapping[str, Probe], inputs: Sequence[Inputs], *, warm: bool, settle: bool = False
) -> str:
    """The name of the probe that is fastest on these inputs."""
    timings = timing.interleave(probes, inputs, TRIAL_ROUNDS, warm=warm, settle=settle)
    return min(timings, key=lambda name: timings[name].median)


def measure(case: Case, plan: Plan) -> Measured:
    """Checks and times a case.

    Raises:
        Skip: the case does not fit into memory.
        WrongResult: a candidate computes something else.
    """
    copies = 1 if plan.reused else timing.rotation(case.input_bytes)
    _check_memory(copies, case, case.op.working_bytes, available_memory(), _SPARE_BYTES)
    inputs = make_inputs(case, copies)
    built = candidates.build_candidates(case.op, plan.with_compile)
    right = check_candidates(built, case.op, inputs[0])
    plain, probe = _plain(case, inputs, plan)
    everyone = {**right, **case.op.beside(inputs[0]), **plain}
    timings, load = time_idle(everyone, inputs, plan)
    del inputs, plain, everyone  # before the memory of other processes is measured
    peaks = {name: peak_bytes(case, name) for name in right} if plan.with_memory else {}
    return Measured(rows_of(case, timings, peaks), probe, load)


def _check_memory(
    copies: int, case: Case, working_bytes: int, free: int | None, spare: int = 0
) -> None:
    """Raises :class:`Skip` if the inputs and eager's temporaries would not fit."""
    needed = copies * case.input_bytes + working_bytes * case.numbers + spare
    if free is not None and needed > free:
        raise Skip(f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free")


def _plain(
    case: Case, inputs: Sequence[Inputs], plan: Plan
) -> tuple[dict[str, Candidate], str | None]:
    """``READ`` and, with a backward, ``FLOOR``, or ``PRODUCTS``, and the code behind them.

    Small inputs have none, because their read is as long as a call.
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

    def read_and_fill(given: Inputs) -> tuple[Tensor, Tensor]:
        """Less than this no backward can do."""
        return PROBES[probe](given), FILLS[fill](given)

    return {READ: PROBES[probe], FLOOR: read_and_fill}, f"{probe}; {fill}"


def time_idle(
    calls: Mapping[str, Candidate], inputs: Sequence[Any], plan: Plan
) -> tuple[dict[str, timing.Timing], idle.Load | None]:
    """Timings and the load beside them, of the first attempt that the machine was idle in, or of
    the last.
    """
    how = {"warm": plan.reused, "settle": plan.keeps_memory}
    for left in reversed(range(plan.attempts)):
        begin = idle.reading()
        timings = timing.interleave(calls, inputs, plan.rounds, **how)
        load = idle.since(begin)
        if load is None or load.is_idle or not left:
            return timings, load
    raise ValueError(f"attempts must be at least 1, got {plan.attempts}")


def check_candidates(
    built: dict[str, Candidate],
    op: Op,
    inputs: Inputs,
    failed: dict[str, str] | None = None,
) -> dict[str, Candidate]:
    """Calls each candidate once, and returns those that are right.

    One that may fail is left out with a warning. So is any other that goes wrong, if there is a
    ``failed`` (name -> why) to say so in.
    """
    expected = candidates.truth(op, inputs)
    allowed = candidates.tolerances(op, inputs, expected)
    working = {}
    for name, call in built.items():
        try:
            candidates.check_outputs(name, op, call(inputs), expected, allowed)
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
    """True if the error is no mistake of klfast or of its benchmark.

    ``torch.compile`` needs a compiler, other libraries need a device or a version, and eager
    formulas may need more memory than the machine has.
    """
    if candidates.is_ours(name) or isinstance(error, candidates.WrongResult):
        return False
    return name.startswith((candidates.COMPILE, *rivals.LIBRARIES)) or isinstance(
        error, torch.OutOfMemoryError
    )


def one_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _row(
    case: Case,
    name: str,
    timed: timing.Timing,
    ours: timing.Timing,
    plain_bytes: Mapping[str, int],
    read_speed: float | None,
) -> Row:
    """The numbers of every device. ``read_speed`` is in bytes a second."""
    moved = plain_bytes.get(name, case.least_bytes)
    speed = read_speed and moved / timed.median
    return {
        "case": case.name,
        "op": case.op.name,
        "dtype": case.dtype,
        "shape": list(case.shape),
        "impl": name,
        "ratio": None if name in plain_bytes else timed.median / ours.median,
        "rounds": len(timed.seconds),
        "bytes": moved,
        "gb_per_s": speed and speed / 1e9,
        "read_share": speed and read_speed and speed / read_speed,
    }


def rows_of(
    case: Case, timings: Mapping[str, timing.Timing], peaks: Mapping[str, int | None] | None = None
) -> list[Row]:
    read = timings.get(READ)
    floor = timings.get(FLOOR, timings.get(PRODUCTS, read))
    plain_bytes = {READ: case.input_bytes, FLOOR: case.input_bytes + case.gradient_bytes}
    read_speed = None if read is None else case.input_bytes / read.median
    return [
        _row(case, name, timed, timings[candidates.KLFAST], plain_bytes, read_speed)
        | {
            "peak_bytes": (peaks or {}).get(name),
            "median_ms": timed.median * 1e3,
            "min_ms": timed.best * 1e3,
            "calls": timed.calls,
            "floor_ratio": None if floor is None else timed.median / floor.median,
            "page_faults": median(timed.faults) if timed.faults else None,
        }
        for name, timed in timings.items()
    ]


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line), None)


@dataclass(frozen=True)
class Ceilings:
    """The bandwidth of plain reads and copies of much memory, in 1e9 bytes per second.

    A copy's bytes are read and written. ``nothing_us``: what the timing of no call shows.
    """

    read_gb_per_s: float
    copy_gb_per_s: float
    nothing_us: float


def find_place() -> torch.device | None:
    """The current CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


class NoBackend(Exception):  # noqa: N818  # said in the words of the message
    """There is nothing of klfast's to time; its text is the whole message."""


def usable_backends(place: torch.device) -> tuple[list[BackendName], str]:
    """The backends of klfast that serve a device, and why the others do not.

    Raises:
        NoBackend: none does, or under ``KLFAST_REQUIRE_CUDA=1`` not all do.
    """
    reasons = {name: backends.BACKENDS[name].why_not(place) for name in KLFAST_BACKENDS}
    usable = [name for name, reason in reasons.items() if reason is None]
    missing = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    if not usable or (missing and os.environ.get("KLFAST_REQUIRE_CUDA") == "1"):
        raise NoBackend(f"klfast cannot be timed on {place.type}: {missing}")
    return usable, missing


def measure_ceilings(device: timing.Cuda, place: torch.device) -> Ceilings:
    """The read and the copy bandwidth of a device, by the fastest of torch's plain ones."""
    size = min(_CEILING_BYTES, device.free_bytes() // 4) // 8 * 8
    storage = torch.ones(size // 8, dtype=torch.int64, device=place)
    inputs = Inputs((), storage=storage)
    copy = torch.empty_like(storage)
    calls: dict[str, Call] = {name: partial(probe, inputs) for name, probe in GPU_PROBES.items()}
    calls[COPY] = partial(copy.copy_, storage)
    calls["nothing"] = lambda: None
    seconds = few_rounds(device, calls)
    return Ceilings(
        read_gb_per_s=size / min(seconds[name] for name in GPU_PROBES) / 1e9,
        copy_gb_per_s=2 * size / seconds[COPY] / 1e9,
        nothing_us=seconds["nothing"] * 1e6,
    )


def few_rounds(device: timing.Cuda, calls: Mapping[str, Call]) -> dict[str, float]:
    """A few cold rounds of each call: the median."""
    for call in calls.values():
        call()
    measures = {
        name: partial(device.queue, call, cold=True, head_start=0.0) for name, call in calls.items()
    }
    timed = timing.alternate(measures, _CEILING_ROUNDS, device.synchronize)
    return {name: sorted(seconds)[len(seconds) // 2] for name, seconds in timed.items()}


class GpuBench:
    """Measures cases on one device, within one budget."""

    def __init__(self, place: torch.device, plan: Plan, cases: Sequence[Case]):
        self.place, self.plan = place, plan
        self.device = timing.Cuda(place)
        self.backends, missing = usable_backends(place)
        self.libraries: dict[str, rivals.Forwards] = {}
        without: dict[str, str] = {}
        if any(isinstance(case.op, LogitsOp) for case in cases):
            self.libraries, without = rivals.installed()
        self.missing = [missing] if missing else []
        self.missing += [f"{name}: {reason}" for name, reason in without.items()]
        self.ceilings = measure_ceilings(self.device, place)
        self.cases, self.begun = len(cases), time.monotonic()
        self.failed: dict[str, str] = {}
        """Case and candidate -> what went wrong; the others of the case are measured."""

    def measure(self, case: Case) -> Measured:
        """The rows of a case, klfast first; and the name of the probe behind its ``read``.

        Raises:
            Skip: the case does not fit into the memory or the budget.
            NoBackend: none of klfast's works.
        """
        left = self.plan.budget - (time.monotonic() - self.begun)
        if left <= 0:
            raise Skip(f"the budget of {self.plan.budget:.0f} s was used up")
        modes = [*candidates.MODES] if self.plan.with_compile else []
        if modes and left / max(1, self.cases) < _AUTOTUNING_SECONDS:
            modes.remove(AUTOTUNED)
            warnings.warn(f"{AUTOTUNED} is left out, to stay within the budget", stacklevel=2)
        self.cases -= 1
        _check_memory(2, case, case.op.gpu_working_bytes, self.device.free_bytes())
        inputs = make_inputs(case, 1, self.place)[0]
        others = {
            name: forwards[case.op.name]
            for name, forwards in self.libraries.items()
            if case.op.name in forwards
        }
        probe, plain = self._plain(case, inputs)  # its memory is needed to the end
        built = candidates.build_gpu_candidates(case, self.backends, modes, others)
        failed: dict[str, str] = {}
        right = check_candidates(built, case.op, inputs, failed)
        self.failed |= {f"{case.name}, {name}": reason for name, reason in failed.items()}
        if not set(self.backends) & set(right):
            raise NoBackend("no backend of klfast works")
        calls: dict[str, Call] = {name: partial(call, inputs) for name, call in right.items()}
        timings = timing.time_on(self.device, {**calls, **plain}, self.plan.rounds)
        for name, timed in timings.items():
            if timed.capture_error is not None:
                warnings.warn(f"{name} is in no CUDA graph: {timed.capture_error}", stacklevel=2)
        return Measured(gpu_rows(case, timings, self.ceilings), probe)

    def _plain(self, case: Case, inputs: Inputs) -> tuple[str, dict[str, Call]]:
        """The fastest plain read of the inputs' bytes by name; it, and the plain copy of them, or
        in the place of both the op's floor.
        """
        floors = case.op.floors()
        if floors is not None:
            name, call = self._fastest(floors, inputs)
            return name, {PRODUCTS: call}
        probe, read = self._fastest(GPU_PROBES, inputs)
        copy = torch.empty_like(inputs.block)
        return probe, {READ: read, COPY: partial(copy.copy_, inputs.block)}

    def _fastest(
        self, ways: Mapping[str, Callable[[Inputs], Any]], inputs: Inputs
    ) -> tuple[str, Call]:
        calls: dict[str, Call] = {name: partial(way, inputs) for name, way in ways.items()}
        seconds = few_rounds(self.device, calls)
        name = min(seconds, key=lambda name: seconds[name])
        return name, calls[name]


def gpu_rows(case: Case, timings: Mapping[str, timing.GpuTiming], ceilings: Ceilings) -> list[Row]:
    """The rows of a case; ratios are to the first timing."""
    first = next(iter(timings.values())).kernel
    plain_bytes = {READ: case.input_bytes, COPY: 2 * case.input_bytes}
    read_speed = ceilings.read_gb_per_s * 1e9 if READ in timings else None
    return [
        _row(case, name, timed.kernel, first, plain_bytes, read_speed)
        | {
            "peak_bytes": timed.peak_bytes,
            "packed": case.packed,
            "kernel_ms": timed.kernel.median * 1e3,
            "kernel_min_ms": timed.kernel.best * 1e3,
            "graph_ms": None if timed.graph is None else timed.graph.median * 1e3,
            "host_ms": timed.host.median * 1e3,
        }
        for name, timed in timings.items()
    ]
