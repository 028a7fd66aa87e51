"""The arms of the experiment: one policy gradient under different rules for the coefficient, and
under two samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from klfast.controllers import CONTROLLERS
from klfast.controllers.base import CoefficientController
from klfast.controllers.target import (
    AdaptiveKLController,
    ExponentialKLController,
    FixedKLController,
)
from lab.settings import Settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Build = Callable[[Settings, "ProcessGroup | None"], CoefficientController]


@dataclass(frozen=True)
class Arm:
    """One rule.

    Attributes:
        name: as typed after ``--arms``.
        label: as printed in tables and curves.
        steers: whether the rule aims at the target.
        controller: builds the klfast controller that gives the coefficient, of the ranks in a
            group.
        is_off_policy: whether its tokens come from a sampler that is not the policy.
        is_corrected: whether its loss is corrected for that.
    """

    name: str
    label: str
    steers: bool
    controller: Build
    is_off_policy: bool = False
    is_corrected: bool = False


def _fixed(coef: Callable[[Settings], float]) -> Build:
    return lambda s, group: FixedKLController(coef(s), process_group=group)


def _adaptive(settings: Settings, group: ProcessGroup | None) -> CoefficientController:
    return AdaptiveKLController(
        settings.init_coef,
        settings.target,
        settings.horizon,
        unit="sequence",
        process_group=group,
    )


def _exponential(settings: Settings, group: ProcessGroup | None) -> CoefficientController:
    return ExponentialKLController(
        settings.init_coef,
        settings.target,
        gain=settings.gain / settings.target,
        unit="sequence",
        process_group=group,
    )


def _rule(name: str) -> Build:
    """The rule with its own defaults, of nats per sequence."""
    make: Any = CONTROLLERS[name]
    return lambda s, group: make(s.init_coef, s.target, unit="sequence", process_group=group)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("none", "no penalty", False, _fixed(lambda s: 0.0)),
        Arm("fixed-low", "fixed, low", False, _fixed(lambda s: s.low_coef)),
        Arm("fixed-high", "fixed, high", False, _fixed(lambda s: s.high_coef)),
        Arm("adaptive", "adaptive (Ziegler)", True, _adaptive),
        Arm("exponential", "exponential", True, _exponential),
        Arm("nupi", "nuPI", True, _rule("nupi")),
        Arm("pid-lagrangian", "PID Lagrangian", True, _rule("pid-lagrangian")),
        Arm("dual", "dual ascent", True, _rule("dual")),
        Arm("doubling", "doubling", True, _rule("doubling")),
        Arm("control-vae", "ControlVAE", True, _rule("control-vae")),
        Arm("stale", "stale sampler", False, _fixed(lambda s: s.low_coef), True),
        Arm("corrected", "stale, corrected", False, _fixed(lambda s: s.low_coef), True, True),
    )
}

PARTNER = "fixed-low"
"""The arm that the arms off the policy are, but for their sampler."""


def on_policy(names: Iterable[str]) -> list[str]:
    """The arms whose tokens are the policy's own."""
    return [name for name in names if not ARMS[name].is_off_policy]


def off_policy(names: Iterable[str]) -> list[str]:
    """The others."""
    return [name for name in names if ARMS[name].is_off_policy]
