"""One case on a GPU, from inputs to rows: check every candidate, time all of them side by side."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks import rivals
from benchmarks.bandwidth import GPU_PROBES
from benchmarks.candidates import AUTOTUNED, COMPILE, MODES, build_gpu_candidates
from benchmarks.cases import Case, Inputs, make_inputs
from benchmarks.gpu_timing import Call, Cuda, GpuTiming, time_on
from benchmarks.linear import LinearOp
from benchmarks.logits import LogitsOp
from benchmarks.measure import PRODUCTS, READ, Measured, Row, Skip, check_candidates
from benchmarks.timing import is_noisy
from klfast import backends
from klfast.names import BackendName
from klfast.selfcheck.clock import alternate

COPY = "copy"
"""The plain copy of the inputs, among the candidates, as ``READ`` is."""

KLFAST_BACKENDS: tuple[BackendName, ...] = ("native", "triton")

_CEILING_BYTES = 2 << 30
_CEILING_ROUNDS = 5
_AUTOTUNING_SECONDS = 5.0
"""A case with less time than this left to it does without the autotuned rival."""


@dataclass(frozen=True, kw_only=True)
class GpuRow(Row):
    """On a GPU.

    Attributes:
        packed: whether the case is.
        kernel_ms, kernel_min_ms: on the device with cold caches, over the rounds.
        graph_ms: on the device in a CUDA graph, where inputs that fit stay in cache; None if it
            cannot be captured, or is too long for launches to matter.
        host_ms: of the host, to queue a call.
        copy_share: ``gb_per_s`` as a share of the copy's ceiling.
    """

    packed: bool
    kernel_ms: float
    kernel_min_ms: float
    graph_ms: float | None
    host_ms: float
    copy_share: float

    @property
    def is_noisy(self) -> bool:
        """Whether its median is not to be relied on."""
        return is_noisy(self.kernel_ms, self.kernel_min_ms)


@dataclass(frozen=True)
class Ceilings:
    """The bandwidth of plain reads and copies of much memory, in 1e9 bytes per second.

    A copy's bytes are read and written. ``nothing_us``: what the timing of no call shows.
    """

    read_gb_per_s: float
    copy_gb_per_s: float
    nothing_us: float


@dataclass(frozen=True)
class GpuPlan:
    """How to measure.

    Attributes:
        rounds: of each case.
        budget: seconds for all cases; those that come too late are left out, visibly.
        with_compile: whether ``torch.compile`` is among the rivals.
    """

    rounds: int
    budget: float
    with_compile: bool = True


@dataclass
class Clock:
    """The rest of a budget, and the number of cases that it is for."""

    budget: float
    cases: int
    now: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()

    def next_case(self) -> float:
        """The seconds that the next case may take.

        Raises:
            Skip: nothing is left.
        """
        left = self.budget - (self.now() - self.begun)
        if left <= 0:
            raise Skip(f"the budget of {self.budget:.0f} s was used up")
        share = left / max(1, self.cases)
        self.cases -= 1
        return share


def modes_within(seconds: float, with_compile: bool) -> Sequence[str]:
    """The modes of ``torch.compile`` that a case has time for, with a warning if not all."""
    if not with_compile:
        return ()
    if seconds >= _AUTOTUNING_SECONDS:
        return tuple(MODES)
    warnings.warn(f"{AUTOTUNED} is left out, to stay within the budget", stacklevel=2)
    return (COMPILE,)


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


def measure_ceilings(device: Cuda, place: torch.device) -> Ceilings:
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


def few_rounds(device: Cuda, calls: Mapping[str, Call]) -> dict[str, float]:
    """A few cold rounds of each call: the median."""
    for call in calls.values():
        call()
    measures = {
        name: partial(device.queue, call, cold=True, head_start=0.0) for name, call in calls.items()
    }
    timed = alternate(measures, _CEILING_ROUNDS, device.synchronize)
    return {name: sorted(seconds)[len(seconds) // 2] for name, seconds in timed.items()}


class GpuBench:
    """Measures cases on one device, within one budget."""

    def __init__(self, place: torch.device, plan: GpuPlan, cases: Sequence[Case]):
        self.place, self.plan = place, plan
        self.device = Cuda(place)
        self.backends, missing = usable_backends(place)
        self.libraries: dict[str, rivals.Forwards] = {}
        without: dict[str, str] = {}
        if any(isinstance(case.op, LogitsOp | LinearOp) for case in cases):
            self.libraries, without = rivals.installed()
        self.missing = [missing] if missing else []
        self.missing += [f"{name}: {reason}" for name, reason in without.items()]
        self.ceilings = measure_ceilings(self.device, place)
        self.clock = Clock(plan.budget, len(cases))
        self.failed: dict[str, str] = {}
        """Case and candidate -> what went wrong; the others of the case are measured."""

    def measure(self, case: Case) -> Measured:
        """The rows of a case, klfast first; and the name of the probe behind its ``read``.

        Raises:
            Skip: the case does not fit into the memory or the budget.
            NoBackend: none of klfast's works.
        """
        seconds = self.clock.next_case()
        self._check_memory(case)
        inputs = make_inputs(case, 1, self.place)[0]
        modes = modes_within(seconds, self.plan.with_compile)
        others = {
            name: forwards[case.op.name]
            for name, forwards in self.libraries.items()
            if case.op.name in forwards
        }
        probe, plain = self._plain(case, inputs)  # its memory is needed to the end
        built = build_gpu_candidates(case, self.backends, modes, others)
        failed: dict[str, str] = {}
        candidates = check_candidates(built, case.op, inputs, failed)
        self.failed |= {f"{case.name}, {name}": reason for name, reason in failed.items()}
        if not set(self.backends) & set(candidates):
            raise NoBackend("no backend of klfast works")
        calls: dict[str, Call] = {name: partial(call, inputs) for name, call in candidates.items()}
        timings = time_on(self.device, {**calls, **plain}, self.plan.rounds)
        for name, timing in timings.items():
            if timing.capture_error is not None:
                warnings.warn(f"{name} is in no CUDA graph: {timing.capture_error}", stacklevel=2)
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
        storage = inputs.storage
        assert storage is not None
        copy = torch.empty_like(storage)
        return probe, {READ: read, COPY: partial(copy.copy_, storage)}

    def _fastest(
        self, ways: Mapping[str, Callable[[Inputs], Any]], inputs: Inputs
    ) -> tuple[str, Call]:
        calls: dict[str, Call] = {name: partial(way, inputs) for name, way in ways.items()}
        seconds = few_rounds(self.device, calls)
        name = min(seconds, key=lambda name: seconds[name])
        return name, calls[name]

    def _check_memory(self, case: Case) -> None:
        needed = 2 * case.input_bytes + case.op.gpu_working_bytes * case.numbers
        free = self.device.free_bytes()
        if needed > free:
            raise Skip(f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free")


def gpu_rows(case: Case, timings: Mapping[str, GpuTiming], ceilings: Ceilings) -> list[GpuRow]:
    """The rows of a case; ratios are to the first timing."""
    first = next(iter(timings.values())).kernel.median
    return [_row(case, name, timing, first, ceilings) for name, timing in timings.items()]


def _row(case: Case, name: str, timing: GpuTiming, first: float, ceilings: Ceilings) -> GpuRow:
    moved = {READ: case.input_bytes, COPY: 2 * case.input_bytes}.get(name, case.least_bytes)
    speed = moved / timing.kernel.median / 1e9
    return GpuRow(
        case=case.name,
        op=case.op.name,
        dtype=case.dtype,
        shape=list(case.shape),
        packed=case.packed,
        impl=name,
        kernel_ms=timing.kernel.median * 1e3,
        kernel_min_ms=timing.kernel.best * 1e3,
        graph_ms=None if timing.graph is None else timing.graph.median * 1e3,
        host_ms=timing.host.median * 1e3,
        ratio=None if name in (READ, COPY) else timing.kernel.median / first,
        rounds=len(timing.kernel.seconds),
        bytes=moved,
        gb_per_s=speed,
        read_share=speed / ceilings.read_gb_per_s,
        copy_share=speed / ceilings.copy_gb_per_s,
        peak_bytes=timing.peak_bytes,
    )
