"""Timing on a GPU: its own clock for the kernels, the host's for the call.

Kernels are timed by events, each time with cold caches, and with the device kept busy until the
host has queued the whole call: what is measured is the device's work, not the host's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.timing import Timing
from klfast.selfcheck import clock
from klfast.selfcheck.clock import alternate

Call = clock.Call
Read = Callable[[], float]
"""Gives the seconds of what was queued, once the device is done."""

GRAPH_CALLS = 10
"""How many calls a CUDA graph holds when one is timed: more than a launch of the graph costs."""

HOST_CALLS = 20
"""How many calls the host queues in one timing: fewer kernels than fit into the queue."""

LONG_CALL = 5e-3
"""Seconds from which a call's launches cost next to nothing: it is timed in no graph, and queued
less often."""


class Cuda(clock.Cuda):
    """A CUDA device. Tests put one of their own in its place."""

    def capture(self, call: Call, calls: int) -> Call:
        """A CUDA graph of so many calls; what is returned replays it."""
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
        """The most memory that a call holds at once, above what is held already."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def free_bytes(self) -> int:
        """Memory that can be had."""
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
    short = {name: call for name, call in calls.items() if _is_short(device, call)}
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
    replays, errors = _capture_all(device, short)
    graphs = {
        name: partial(device.queue, replay, cold=False, head_start=0.0)
        for name, replay in replays.items()
    }
    graph = alternate(graphs, max(3, rounds // 2), device.synchronize)
    return {
        name: GpuTiming(
            kernel=Timing(kernel[name], 1),
            graph=_per_call(graph[name], GRAPH_CALLS) if name in graph else None,
            host=Timing(host[name], queued[name]),
            peak_bytes=peaks[name],
            capture_error=errors.get(name),
        )
        for name in calls
    }


def _is_short(device: Cuda, call: Call) -> bool:
    """Whether one of three calls is: another process may delay one of them."""
    return any(_seconds(device, call) < LONG_CALL for _ in range(3))


def _seconds(device: Cuda, call: Call) -> float:
    """About what a call takes, the host's part and the device's."""
    device.synchronize()
    begin = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - begin


def _queue_many(device: Cuda, call: Call, calls: int) -> Read:
    """The host's seconds for a call, of several that it queues without waiting for them."""
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - begin) / calls
    device.synchronize()
    return lambda: seconds


def _capture_all(device: Cuda, calls: Mapping[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """Replays of the calls that can be captured, and why the others cannot."""
    replays, errors = {}, {}
    for name, call in calls.items():
        try:
            replays[name] = device.capture(call, GRAPH_CALLS)
        except Exception as error:  # a rival's failure is a result
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return replays, errors


def _per_call(seconds: list[float], calls: int) -> Timing:
    return Timing([each / calls for each in seconds], calls)
