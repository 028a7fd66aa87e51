"""Checks that the machine was idle except for the benchmark, from the CPU time of other processes.

Their time is the system's busy time (``/proc/stat``; elsewhere nothing is known) minus the
process's own time. Time that a hypervisor stole counts as others'. The load average reacts within
minutes, these counts within 10 ms.
"""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

LIMIT = 0.05
"""Share of the cores' time that others may take in a table that is published. A virtual
machine of two cores shows up to 0.01 when it is idle, 0.03 when the hypervisor takes time, and 0.5
beside one busy process."""

SLACK = 0.05  # seconds of others' time that are no evidence: each core counts in ticks of 0.01 s

_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)
"""user, nice, system, irq, softirq and steal; a guest's time is in user."""


class Load(NamedTuple):
    """The CPU time of others in a window.

    Attributes:
        others: seconds on the cores that the process may use.
        capacity: seconds that these cores had.
        all_others, all_capacity: the same of all cores, which share the memory's bandwidth.
    """

    others: float = 0.0
    capacity: float = 0.0
    all_others: float = 0.0
    all_capacity: float = 0.0

    @property
    def share(self) -> float:
        """The larger share of the cores' time."""
        pairs = ((self.others, self.capacity), (self.all_others, self.all_capacity))
        return max([0.0, *(others / capacity for others, capacity in pairs if capacity > 0)])

    @property
    def is_idle(self) -> bool:
        """True if others took at most ``LIMIT`` of either, and ``SLACK``."""
        pairs = ((self.others, self.capacity), (self.all_others, self.all_capacity))
        return all(others <= LIMIT * capacity + SLACK for others, capacity in pairs)


class Reading(NamedTuple):
    """The counts at one moment: seconds by the clock, of the process, and busy ones by core."""

    clock: float
    own: float
    busy: Mapping[int, float]


def reading() -> Reading | None:
    """The counts now; None where the system does not tell."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    busy = {
        int(words[0][3:]): sum(int(words[field]) for field in _BUSY_FIELDS) / ticks
        for words in lines
        if words and words[0][:3] == "cpu" and words[0][3:].isdigit()
    }
    return Reading(time.monotonic(), time.process_time(), busy)


def since(begin: Reading | None) -> Load | None:
    """The load from a reading to now; None where the system does not tell."""
    end = reading()
    if begin is None or end is None:
        return None
    seconds, own = end.clock - begin.clock, end.own - begin.own
    busy = {core: end.busy[core] - begin.busy.get(core, 0.0) for core in end.busy}
    usable = {*busy}
    if hasattr(os, "sched_getaffinity"):
        usable &= os.sched_getaffinity(0)
    mine = sum(busy[core] for core in usable) - own
    return Load(mine, seconds * len(usable), sum(busy.values()) - own, seconds * len(busy))


def total(loads: Iterable[Load]) -> Load:
    return Load(*map(sum, zip(*loads, strict=True)))
