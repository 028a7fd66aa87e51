"""Why a KL is not at its target: a target in the other unit, a bound, a coefficient too slow.

These are guesses from floats that the host has anyway. They change nothing: neither the coefficient
nor the state of a checkpoint depends on them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

UPDATES = 100  # for how many updates in a row a KL must be off on one side to be a stall

_FAR, _NEAR = 20.0, 5.0
_OFF = 0.2  # times the target; the error of Ziegler's controller reaches its clip there
_NEARER = 0.95  # the mean distance of the last fifth over an earlier fifth's
PLAUSIBLE = 1.0  # nats per token; a policy is held at a lower target

OTHER_UNIT: dict[str, Any] = {"sequence": "token", "token": "sequence"}


class Means(NamedTuple):
    """The mean KL of a batch in nats: in the unit of its reader, and in the other one.

    NaN where it is not known, as of a plain number in the other unit, or not needed.
    """

    kl: float
    other: float = math.nan


def is_far(kl: float, target: float) -> bool:
    """True if the KL is over 20 times off its target, in either direction."""
    return kl > _FAR * target or kl < target / _FAR


def is_of_other_unit(means: Means, target: float) -> bool:
    """True if the KL is over 20 times off its target, and within 5 times in the other unit."""
    return is_far(means.kl, target) and target / _NEAR <= means.other <= _NEAR * target


@dataclass
class Stall:
    """Updates in a row in which the KL was off its target on one side, by over a fifth."""

    side: int = 0  # 1 above the target, -1 below it, 0 for neither
    updates: int = 0
    begun_at: float = 0.0  # the coefficient before the first
    # sums of abs(log(kl / target)) over three of their fifths
    first: float = 0.0
    middle: float = 0.0
    last: float = 0.0

    def add(self, kl: float, target: float, band: float, before: float, after: float) -> bool:
        """True if this update completes ``UPDATES`` that brought the KL no nearer to its target.

        ``band``, in targets, is the accepted distance. ``before`` is the coefficient that the batch
        was taken with, and ``after`` the next one.
        """
        off = kl / target - 1
        side = 0 if abs(off) <= max(band, _OFF) else 1 if off > 0 else -1
        # A KL that changes sides is being steered. After a whole row the next one begins.
        if side != self.side or self.updates == UPDATES:
            self.side, self.updates, self.begun_at = side, 0, before
            self.first = self.middle = self.last = 0.0
        if side == 0:
            return False
        # Sums over fifths, because a single KL is noisy.
        fifth = self.updates * 5 // UPDATES
        self.updates += 1
        least = max(1e-6 * target, sys.float_info.min)  # used for a KL of 0 or less
        # Logarithms, so that half the target is as far as twice the target.
        distance = abs(math.log(max(kl, least)) - math.log(target))
        self.first += distance if fifth == 0 else 0.0
        self.middle += distance if fifth == 2 else 0.0
        self.last += distance if fifth == 4 else 0.0
        # A KL that overshoots is on its way back in the middle fifth. Updates do not count if the
        # coefficient moved against the KL's side over all of them.
        return (
            self.updates == UPDATES
            and self.last >= _NEARER * max(self.first, self.middle)
            and (after - self.begun_at) * side >= 0
        )
