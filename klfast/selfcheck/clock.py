"""Timing candidates side by side, so that what else the machine does reaches all of them alike."""

from __future__ import annotations

import itertools
import math
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

LEAST_SECONDS = 1e-3
"""A call shorter than this is repeated until a timing lasts that long."""

ROTATED_BYTES = 128 << 20
MAX_COPIES = 8

LEAST_FLUSH = 256 << 20
_HEAD_START = 100e-6
_CYCLES_PER_SECOND = 2e9  # about the fastest clock; a slower one waits longer

T = TypeVar("T")
Call = Callable[[], Any]


def rotation(input_bytes: int) -> int:
    """How many sets of inputs take turns: enough to exceed caches, unless they are small."""
    return min(MAX_COPIES, max(2, math.ceil(ROTATED_BYTES / max(1, input_bytes))))


def timers_of(
    candidates: Mapping[str, Callable[[T], Any]], inputs: Sequence[T]
) -> dict[str, timeit.Timer]:
    """A timer for each candidate, on a CPU.

    Every call, whoever makes it, takes the next of ``inputs`` in turn: before a set comes back, all
    the others have gone through the caches. What a call returns is freed within its timing.
    """
    turns = itertools.cycle(inputs)
    return {
        name: timeit.Timer(lambda call=call: call(next(turns)))  # type: ignore[misc]
        for name, call in candidates.items()
    }


def calls_per_timing(timer: timeit.Timer) -> int:
    """How many calls last ``LEAST_SECONDS``. The first call is not timed."""
    timer.timeit(1)
    seconds = timer.timeit(1)
    if seconds < LEAST_SECONDS:
        seconds = min(timer.repeat(3, 1))
    return max(1, math.ceil(LEAST_SECONDS / seconds))


def alternate(
    measures: Mapping[str, Callable[[], Callable[[], T]]],
    rounds: int,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, list[T]]:
    """Starts every measurement once a round, in alternating order, and reads them at its end.

    Args:
        measures: name -> what starts a measurement, and returns what reads it.
        rounds: how many.
        synchronize: waits for what was queued.
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


class Cuda:
    """The clock of a CUDA device. Its flush buffer is larger than the second-level cache."""

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.device = device
        self._flush = torch.empty(max(2 * cache, LEAST_FLUSH), dtype=torch.int8, device=device)

    def queue(self, call: Call, *, cold: bool, head_start: float) -> Callable[[], float]:
        """Queues a timed call; what is returned gives its seconds once the device is done.

        The device is kept busy until the host has queued the whole call: what is measured is the
        device's work, not the host's.

        Args:
            call: what is timed.
            cold: whether its inputs are to be out of the caches.
            head_start: seconds that the host needs to queue it.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((2 * head_start + _HEAD_START) * _CYCLES_PER_SECOND))
        if cold:
            self._flush.zero_()
            self._flush.view(torch.int64).amax()  # or what is timed would write the zeros back
        start.record()
        call()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        """Waits for what was queued."""
        torch.cuda.synchronize(self.device)
