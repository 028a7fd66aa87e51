"""The rules under study, their published gains, and the gains that are searched for better ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klfast.control.base import TargetController
from klfast.control.table import CONTROLLERS
from lab.settings import ARMS

BATCH = 40
"""Sequences in an update, as in ``python -m lab compare``."""

MIN_COEF, MAX_COEF = 1e-6, 100.0
"""The bounds of every rule."""

Gains = dict[str, Any]
"""Settings of a rule: numbers, or tensors [G, 1] of many at once."""


@dataclass(frozen=True)
class Candidate:
    """A rule and its gains.

    Attributes:
        name: as of ``python -m lab compare --arms``.
        source: what the first gains are: ``"published"`` or ``"default"``, of klfast's own.
        gains: those.
        scaled: (gains, factor, balance) -> the gains with all of them times factor, and those that
            integrate times balance too.
        balanced: whether there is something to balance.
    """

    name: str
    source: str
    gains: Gains
    scaled: Callable[[Gains, Tensor, Tensor], Gains]
    balanced: bool = False

    @property
    def label(self) -> str:
        """As printed."""
        return ARMS[self.name].label

    def make(self, target: float) -> TargetController:
        """A controller with the first gains; the coefficient that it begins with is set later."""
        bounds = {"min_coef": MIN_COEF, "max_coef": MAX_COEF}
        make: Any = CONTROLLERS[self.name]
        made: TargetController = make(1.0, target, **{"unit": "sequence", **bounds, **self.gains})
        return made


def _scale(*proportional: str, integral: str = "") -> Callable[[Gains, Tensor, Tensor], Gains]:
    def scaled(gains: Gains, factor: Tensor, balance: Tensor) -> Gains:
        new = {name: gains[name] * factor for name in proportional}
        if integral:
            new[integral] = gains[integral] * factor * balance
        return new

    return scaled


def _faster_horizon(gains: Gains, factor: Tensor, balance: Tensor) -> Gains:
    return {"horizon": gains["horizon"] / factor}


def _larger_factor(gains: Gains, factor: Tensor, balance: Tensor) -> Gains:
    return {"factor": torch.pow(float(gains["factor"]), factor)}


CANDIDATES = (
    # lm-human-preferences: 512 sequences a batch, a horizon of 10,000
    Candidate("adaptive", "published", {"horizon": 10_000 * BATCH / 512}, _faster_horizon),
    Candidate("exponential", "default", {"gain": 0.1}, _scale("gain")),
    Candidate("nupi", "default", {"kp": 1.0, "ki": 0.1}, _scale("kp", integral="ki"), True),
    # omnisafe's PIDLagrangian, for costs whose limit is 25; klfast's ki is a quarter of it
    Candidate(
        "pid-lagrangian",
        "published",
        {"kp": 0.1, "ki": 0.01, "kd": 0.01},
        _scale("kp", "kd", integral="ki"),
        True,
    ),
    Candidate("dual", "default", {"lr": 0.03}, _scale("lr")),
    # Schulman et al. 2017: after every batch
    Candidate("doubling", "published", {"factor": 2.0, "every": 1}, _larger_factor),
    # Shao et al. 2020, the language model: ki is 1e-4 a nat, and the target here 6 nats
    Candidate(
        "control-vae", "published", {"kp": 0.01, "ki": 6e-4}, _scale("kp", integral="ki"), True
    ),
)
