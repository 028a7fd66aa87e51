"""Checks that the machine was idle except for the benchmark, from the CPU time of other processes.

Their time is the system's busy time (``/proc/stat``; elsewhere nothing is known) minus the
process's own time. Time that a hypervisor stole counts as others'. The load average reacts within
minutes, these counts within 10 ms.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LIMIT = 0.05
"""Share of the cores' time that others may take in a table that is published. A virtual
machine of two cores shows up to 0.01 when it is idle, 0.03 when the hypervisor takes time, and 0.5
beside one busy process."""

SLACK = 0.05
"""Seconds of others' time that are no evidence: each core counts in ticks of 0.01 s."""

SAMPLE_SECONDS = 1.0

_STAT = Path("/proc/stat")
_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)
"""user, nice, system, irq, softirq and steal; a guest's time is in user."""


@dataclass(frozen=True)
class Load:
    """The CPU time of others in a window.

    Attributes:
        others: seconds on the cores that the process may use.
        capacity: seconds that these cores had.
        all_others, all_capacity: the same of all cores, which share the memory's bandwidth.
    """

    others: float
    capacity: float
    all_others: float
    all_capacity: float

    @property
    def share(self) -> float:
        """The larger share of the cores' time."""
        return max(
            _share(self.others, self.capacity), _share(self.all_others, self.all_capacity), 0.0
        )

    @property
    def is_idle(self) -> bool:
        """True if others took at most ``LIMIT`` of either, and ``SLACK``."""
        return (
            self.others <= LIMIT * self.capacity + SLACK
            and self.all_others <= LIMIT * self.all_capacity + SLACK
        )

    def __add__(self, other: Load) -> Load:
        return Load(
            self.others + other.others,
            self.capacity + other.capacity,
            self.all_others + other.all_others,
            self.all_capacity + other.all_capacity,
        )


NOTHING = Load(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Reading:
    """The counts at one moment: seconds by the clock, of the process, and busy ones by core."""

    clock: float
    own: float
    busy: Mapping[int, float]


def reading() -> Reading | None:
    """The counts now; None where the system does not tell."""
    busy = _busy_by_core()
    return None if busy is None else Reading(time.monotonic(), time.process_time(), busy)


def since(begin: Reading | None) -> Load | None:
    """The load from a reading to now; None where the system does not tell."""
    end = reading()
    return None if begin is None or end is None else between(begin, end, _usable_cores(end))


def between(begin: Reading, end: Reading, usable: set[int]) -> Load:
    """The load between two readings of a process that may use some cores."""
    seconds = end.clock - begin.clock
    own = end.own - begin.own
    busy = {core: end.busy[core] - begin.busy.get(core, 0.0) for core in end.busy}
    return Load(
        others=sum(busy[core] for core in usable) - own,
        capacity=seconds * len(usable),
        all_others=sum(busy.values()) - own,
        all_capacity=seconds * len(busy),
    )


def sample(seconds: float = SAMPLE_SECONDS) -> Load | None:
    """The load while the process sleeps; None where the system does not tell."""
    begin = reading()
    time.sleep(seconds)
    return since(begin)


def _share(others: float, capacity: float) -> float:
    return others / capacity if capacity > 0 else 0.0


def _usable_cores(now: Reading) -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        return set(now.busy)
    return os.sched_getaffinity(0) & set(now.busy)


def _busy_by_core() -> dict[int, float] | None:
    try:
        text = _STAT.read_text()
    except OSError:
        return None
    return parse_stat(text, os.sysconf("SC_CLK_TCK"))


def parse_stat(text: str, ticks: int) -> dict[int, float]:
    """Busy seconds by core from the text of ``/proc/stat``, which counts ``ticks`` a second."""
    lines = (line.split() for line in text.splitlines())
    cores = (words for words in lines if words and words[0][:3] == "cpu" and words[0][3:].isdigit())
    return {
        int(words[0][3:]): sum(int(words[field]) for field in _BUSY_FIELDS) / ticks
        for words in cores
    }
