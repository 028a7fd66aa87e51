"""Why a KL is not at its target: a target in the other unit, a bound, a coefficient too slow.

These are guesses from floats that the host has anyway. They change nothing: neither the coefficient
nor the state of a checkpoint depends on them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

UPDATES = 100
"""For how many updates in a row a KL must be off on one side to be a stall."""

_FAR, _NEAR = 20.0, 5.0
_OFF = 0.2  # times the target; the error of Ziegler's controller reaches its clip there
_NEARER = 0.95  # the mean distance of the last fifth over an earlier fifth's
PLAUSIBLE = 1.0
"""Nats per token; a policy is held at a lower target."""

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


def unit_question(name: str, means: Means, unit: str, target: float) -> str:
    """The warning of a target that seems to be in the other unit."""
    other = OTHER_UNIT[unit]
    return (
        f"{name}: the KL is {means.kl:.3g} nats per {unit}, {means.kl / target:.2g} times its "
        f"target of {target:.4g}, and {means.other:.3g} nats per {other}, which is near it; did "
        f"you mean unit={other!r}?"
    )


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

        The last fifth of the updates is compared with the first and the middle fifth. A KL that
        overshoots is on its way back in the middle one. Updates do not count if the coefficient
        moved against the KL's side over all of them.

        ``band``, in targets, is the accepted distance. ``before`` is the coefficient that the batch
        was taken with, and ``after`` the next one.
        """
        off = kl / target - 1
        side = 0 if abs(off) <= max(band, _OFF) else 1 if off > 0 else -1
        if side != self.side or self.updates == UPDATES:
            self.side, self.updates, self.begun_at = side, 0, before
            self.first = self.middle = self.last = 0.0
        if side == 0:
            return False
        fifth = self.updates * 5 // UPDATES
        self.updates += 1
        least = max(1e-6 * target, sys.float_info.min)  # used for a KL of 0 or less
        distance = abs(math.log(max(kl, least)) - math.log(target))
        self.first += distance if fifth == 0 else 0.0
        self.middle += distance if fifth == 2 else 0.0
        self.last += distance if fifth == 4 else 0.0
        return (
            self.updates == UPDATES
            and self.last >= _NEARER * max(self.first, self.middle)
            and (after - self.begun_at) * side >= 0
        )


def stall_warning(
    name: str,
    stall: Stall,
    value: float,
    bounds: tuple[float, float],
    means: Means,
    unit: str,
    target: float,
    pace: str,
) -> str:
    """The warning of a coefficient at its bound, or one whose moves do not show in the KL.

    ``pace`` names the setting of its speed. A coefficient that has not even changed by half in so
    many updates is slow. If it has changed by more, the KL does not follow it. Then the penalty is
    not in the loss, or the first coefficient was far from values that have an effect.
    """
    other, is_above = OTHER_UNIT[unit], stall.side > 0
    measured = f"{means.kl:.3g} nats per {unit}, target {target:.4g}"
    question = f"if the target is in nats per {other}, pass unit={other!r}"
    if value == bounds[is_above]:
        where, bound, remedy = (
            "below",
            "min_coef",
            ("without a penalty too the policy stays this near to its reference: lower target"),
        )
        if is_above:
            where, bound, remedy = "above", "max_coef", "raise max_coef, or lower the learning rate"
        return (
            f"{name}: the coefficient is at its bound {bound}={value:.4g}, and for {UPDATES} "
            f"updates the KL has been {where} its target: {measured}; {remedy}; {question}"
        )
    less, more = sorted((stall.begun_at, value))
    if more > 1.5 * less:
        pace = f"the KL does not follow it yet: check that it is in the loss; {question}"
    return (
        f"{name}: in {UPDATES} updates the coefficient went from {stall.begun_at:.4g} to "
        f"{value:.4g}, and the KL came no nearer to its target: {measured}; {pace}"
    )
