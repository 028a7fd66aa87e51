"""Timing candidates side by side, so that other work on the machine affects all of them alike.

``alternate`` is the one loop. On a CPU ``interleave`` gives it timers; on a GPU ``time_on`` gives
it the device's own clock for the kernels and the host's for the call. Kernels are timed by events,
each time with cold caches. The device is kept busy until the host has queued the whole call, so
that the device's work is measured and not the host's.
"""

import itertools
import math
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.memory import page_faults

LEAST_SECONDS = 1e-3  # a call shorter than this is repeated until a timing lasts that long

ROTATED_BYTES = 128 << 20
MAX_COPIES = 8

SETTLING_ROUNDS = 24  # at most so many untimed rounds until kept memory serves every candidate

CALM_ROUNDS = 3
"""So many in a row show it: aligned blocks leave remainders, and the heap grows now and then."""

CALM_FAULTS = 64  # page faults that a calm round may make
NOISY = 2.0  # a median of so many times the minimum is more of a disturbance than of the call

GRAPH_CALLS = 10
"""How many calls a CUDA graph holds when one is timed: more than a launch of the graph costs."""

HOST_CALLS = 20
"""How many calls the host queues in one timing: fewer kernels than fit into the queue."""

LONG_CALL = 5e-3
"""Seconds from which a call's launches cost next to nothing: it is timed in no graph, and queued
less often."""

LEAST_FLUSH = 256 << 20
_HEAD_START = 100e-6
_CYCLES_PER_SECOND = 2e9  # about the fastest clock; a slower one waits longer

T = TypeVar("T")
Call = Callable[[], Any]


def is_noisy(median: float, least: float) -> bool:
    return median >= NOISY * least


def alternate(
    measures: Mapping[str, Callable[[], Callable[[], T]]],
    rounds: int,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, list[T]]:
    """Starts every measurement once a round, in alternating order, and reads them at its end.

    Args:
        measures: name -> a function that starts a measurement and returns a function to read it.
        rounds: how many.
        synchronize: waits for the queued calls.
    """
    measured: dict[str, list[T]] = {name: [] for name in measures}
    order = list(measures)
    for _ in range(rounds):
        reads = {name: measures[name]() for name in order}
        synchronize()
        for name, read in reads.items():
            measured[name].append(read())
        order.reverse()
    return measured


@dataclass(frozen=True)
class Timing:
    """Seconds per call in each round, how many calls a round's timing holds, and page faults per
    call in each round.
    """

    seconds: list[float]
    calls: int
    faults: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def rotation(input_bytes: int) -> int:
    """How many sets of inputs take turns: enough to exceed caches, unless they are small."""
    return min(MAX_COPIES, max(2, math.ceil(ROTATED_BYTES / max(1, input_bytes))))


def interleave(
    candidates: Mapping[str, Callable[[T], Any]],
    inputs: Sequence[T],
    rounds: int,
    *,
    warm: bool = False,
    settle: bool = False,
) -> dict[str, Timing]:
    """Times every candidate once a round, in alternating order.

    Calls of all candidates take the next of ``inputs`` in turn. Before a set is used again, all the
    others have gone through the caches. First calls are not timed. The result of a call is freed
    within its timing, before the next call of any candidate.

    Args:
        candidates: name -> a function of a set of inputs.
        inputs: sets of inputs.
        rounds: how many.
        warm: call once, untimed, before every timing, for inputs that stay in cache.
        settle: begin with untimed rounds until they make no page faults, for kept memory.
    """
    turns = itertools.cycle(inputs)
    timers = {
        name: timeit.Timer(lambda call=call: call(next(turns)))  # type: ignore[misc]
        for name, call in candidates.items()
    }
    calls = {name: _calls_per_timing(timer) for name, timer in timers.items()}
    if settle:
        _settle(timers)

    def timed(name: str) -> Callable[[], tuple[float, float]]:
        if warm:
            timers[name].timeit(1)
        before = page_faults()
        seconds = timers[name].timeit(calls[name])
        faults = page_faults() - before
        return lambda: (seconds / calls[name], faults / calls[name])

    rounds_of = alternate({name: partial(timed, name) for name in candidates}, rounds)
    return {
        name: Timing([s for s, _ in each], calls[name], [f for _, f in each])
        for name, each in rounds_of.items()
    }


def _calls_per_timing(timer: timeit.Timer) -> int:
    """How many calls last ``LEAST_SECONDS``. The first call is not timed."""
    timer.timeit(1)
    seconds = timer.timeit(1)
    if seconds < LEAST_SECONDS:
        seconds = min(timer.repeat(3, 1))
    return max(1, math.ceil(LEAST_SECONDS / seconds))


def _settle(timers: Mapping[str, timeit.Timer]) -> None:
    calm = 0
    for _ in range(SETTLING_ROUNDS):
        before = page_faults()
        for timer in timers.values():
            timer.timeit(1)
        calm = calm + 1 if page_faults() - before <= CALM_FAULTS else 0
        if calm == CALM_ROUNDS:
            return


class Cuda:
    """A CUDA device and its clock. Its flush buffer is larger than the second-level cache. Tests
    put a device of their own in its place.
    """

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.device = device
        self._flush = torch.empty(max(2 * cache, LEAST_FLUSH), dtype=torch.int8, device=device)

    def queue(self, call: Call, *, cold: bool, head_start: float) -> Callable[[], float]:
        """Queues a timed call. The returned function gives its seconds once the device is done.

        Args:
            call: the call to time.
            cold: whether its inputs must be out of the caches.
            head_start: seconds that the host needs to queue it.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((2 * head_start + _HEAD_START) * _CYCLES_PER_SECOND))
        if cold:
            self._flush.zero_()
            self._flush.view(torch.int64).amax()  # or the timed call would write the zeros back
        start.record()
        call()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, call: Call, calls: int) -> Call:
        """Captures ``calls`` calls in a CUDA graph. The returned function replays it."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # lazy initialization must be over before a capture
            call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        return graph.replay

    def peak_bytes(self, call: Call) -> int:
        """The most memory that a call holds at once, beyond the memory held before it."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def free_bytes(self) -> int:
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused


@dataclass(frozen=True)
class GpuTiming:
    """Seconds per call of one candidate.

    Attributes:
        kernel: on the device, with cold caches, in each round.
        graph: on the device, within a CUDA graph of ``GRAPH_CALLS`` calls; None if it cannot be
            captured, or is longer than ``LONG_CALL``.
        host: of the host, to queue a call.
        peak_bytes: memory above the inputs.
        capture_error: why it could not be captured.
    """

    kernel: Timing
    graph: Timing | None
    host: Timing
    peak_bytes: int
    capture_error: str | None = None


def time_on(device: Cuda, calls: Mapping[str, Call], rounds: int) -> dict[str, GpuTiming]:
    """Times every call, side by side in each of its three ways. First calls are not timed."""
    for call in calls.values():
        call()
    peaks = {name: device.peak_bytes(call) for name, call in calls.items()}
    short = {  # the fastest of three counts, as another process may delay the others
        name: call
        for name, call in calls.items()
        if any(_seconds(device, call) < LONG_CALL for _ in range(3))
    }
    queued = {name: HOST_CALLS if name in short else 1 for name in calls}
    host = alternate(
        {name: partial(_queue_many, device, call, queued[name]) for name, call in calls.items()},
        max(3, rounds // 4),
        device.synchronize,
    )
    kernels = {
        name: partial(device.queue, call, cold=True, head_start=statistics.median(host[name]))
        for name, call in calls.items()
    }
    kernel = alternate(kernels, rounds, device.synchronize)
    graphs, errors = {}, {}
    for name, call in short.items():
        try:
            replay = device.capture(call, GRAPH_CALLS)
            graphs[name] = partial(device.queue, replay, cold=False, head_start=0.0)
        except Exception as error:  # a rival's failure is a result
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    graph = alternate(graphs, max(3, rounds // 2), device.synchronize)
    return {
        name: GpuTiming(
            kernel=Timing(kernel[name], 1),
            graph=Timing([each / GRAPH_CALLS for each in graph[name]], GRAPH_CALLS)
            if name in graph
            else None,
            host=Timing(host[name], queued[name]),
            peak_bytes=peaks[name],
            capture_error=errors.get(name),
        )
        for name in calls
    }


def _seconds(device: Cuda, call: Call) -> float:
    """About what a call takes, the host's part and the device's."""
    device.synchronize()
    begin = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - begin


def _queue_many(device: Cuda, call: Call, calls: int) -> Callable[[], float]:
    """The host's seconds for a call, of several that it queues without waiting for them."""
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - begin) / calls
    device.synchronize()
    return lambda: seconds
