"""The arms of the experiment: the same policy gradient under different rules for the coefficient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

from klfast.controllers import AdaptiveKLController, ExponentialKLController, FixedKLController
from klfast.experiment.settings import Settings

Controller = Union[FixedKLController, AdaptiveKLController, ExponentialKLController]


@dataclass(frozen=True)
class Arm:
    """One rule.

    Attributes:
        name: as typed after ``--arms``.
        label: as printed in tables and curves.
        steers: whether the rule aims at the target.
        controller: builds the klfast controller that gives the coefficient.
    """

    name: str
    label: str
    steers: bool
    controller: Callable[[Settings], Controller]


def _adaptive(settings: Settings) -> Controller:
    return AdaptiveKLController(
        settings.init_coef, settings.target, settings.horizon, unit="sequence"
    )


def _exponential(settings: Settings) -> Controller:
    return ExponentialKLController(
        settings.init_coef, settings.target, gain=settings.gain, unit="sequence"
    )


ARMS = {
    arm.name: arm
    for arm in (
        Arm("none", "no penalty", False, lambda settings: FixedKLController(0.0)),
        Arm("fixed-low", "fixed, low", False, lambda settings: FixedKLController(settings.low_coef)),
        Arm("fixed-high", "fixed, high", False, lambda settings: FixedKLController(settings.high_coef)),
        Arm("adaptive", "adaptive (Ziegler)", True, _adaptive),
        Arm("exponential", "exponential", True, _exponential),
    )
}
