"""Timing candidates side by side, so that what else the machine does reaches all of them alike."""

from __future__ import annotations

import math
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from benchmarks.allocator import page_faults
from klfast.selfcheck.clock import alternate, calls_per_timing, timers_of

SETTLING_ROUNDS = 24
"""At most so many untimed rounds until kept memory serves every candidate."""

CALM_ROUNDS = 3
"""So many in a row show it: aligned blocks leave remainders, and the heap grows now and then."""

CALM_FAULTS = 64
"""Page faults that a calm round may make."""

NOISY = 2.0
"""A median of so many times the minimum is more of a disturbance than of the call."""

T = TypeVar("T")


def is_noisy(median: float, least: float) -> bool:
    """Whether timings scatter too much for their median to be relied on."""
    return median >= NOISY * least


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

    @property
    def median_faults(self) -> float | None:
        """None where they were not counted."""
        faults = statistics.median(self.faults or [math.nan])
        return None if math.isnan(faults) else faults


def interleave(
    candidates: Mapping[str, Callable[[T], Any]],
    inputs: Sequence[T],
    rounds: int,
    *,
    warm: bool = False,
    settle: bool = False,
) -> dict[str, Timing]:
    """Times every candidate once a round, in alternating order.

    Every call, whoever makes it, takes the next of ``inputs`` in turn: before a set comes back, all
    the others have gone through the caches. First calls are not timed. What a call returns is freed
    within its timing, before the next call, whoever made it.

    Args:
        candidates: name -> what is called with a set of inputs.
        inputs: sets of inputs.
        rounds: how many.
        warm: call once, untimed, before every timing, for inputs that stay in cache.
        settle: begin with untimed rounds until they make no page faults, for memory that is kept.
    """
    timers = timers_of(candidates, inputs)
    calls = {name: calls_per_timing(timer) for name, timer in timers.items()}
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


def _settle(timers: Mapping[str, timeit.Timer]) -> None:
    calm = 0
    for _ in range(SETTLING_ROUNDS):
        before = page_faults()
        for timer in timers.values():
            timer.timeit(1)
        calm = calm + 1 if page_faults() - before <= CALM_FAULTS else 0
        if calm == CALM_ROUNDS:
            return
