"""Timing candidates side by side, so that what else the machine does reaches all of them alike."""

from __future__ import annotations

import itertools
import math
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

LEAST_SECONDS = 1e-3
"""A call shorter than this is repeated until a timing lasts that long."""

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Seconds per call in each round, and how many calls a round's timing holds."""

    seconds: list[float]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def interleave(
    candidates: Mapping[str, Callable[[T], Any]],
    inputs: Sequence[T],
    rounds: int,
    *,
    warm: bool = False,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times every candidate once a round, in alternating order.

    Every call, whoever makes it, takes the next of ``inputs`` in turn: before a set comes back, all
    the others have gone through the caches. First calls are not timed.

    Args:
        candidates: name -> what is called with a set of inputs.
        inputs: sets of inputs.
        rounds: how many.
        warm: call once, untimed, before every timing, for inputs that stay in cache.
        after_round: called after each, to show progress.
    """
    turns = itertools.cycle(inputs)
    timers = {
        name: timeit.Timer(lambda call=call: call(next(turns)))  # type: ignore[misc]
        for name, call in candidates.items()
    }
    calls = {name: _calls_per_timing(timer) for name, timer in timers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for _ in range(rounds):
        for name in order:
            if warm:
                timers[name].timeit(1)
            seconds[name].append(timers[name].timeit(calls[name]) / calls[name])
        order.reverse()
        after_round()
    return {name: Timing(seconds[name], calls[name]) for name in candidates}


def _calls_per_timing(timer: timeit.Timer) -> int:
    timer.timeit(1)
    seconds = timer.timeit(1)
    if seconds < LEAST_SECONDS:
        seconds = min(timer.repeat(3, 1))
    return max(1, math.ceil(LEAST_SECONDS / seconds))
