"""The controllers under study, their published gains, and the gains that the search changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klfast.controllers import CONTROLLERS
from klfast.controllers.target import TargetController
from lab.settings import ARMS

BATCH = 40
"""Sequences in an update, as in ``python -m lab compare``."""

MIN_COEF, MAX_COEF = 1e-6, 100.0
"""The bounds of the coefficient for every controller."""

Gains = dict[str, Any]
"""Settings of a controller: numbers, or tensors [G, 1] of many numbers at once."""


@dataclass(frozen=True)
class Candidate:
    """A controller and its gains.

    Attributes:
        name: as in ``python -m lab compare --arms``.
        source: the source of the first gains, ``"published"`` or klfast's ``"default"``.
        gains: the first gains.
        proportional: the gains that the search multiplies by a factor.
        integral: the gain that it multiplies by a second factor, if there is one.
    """

    name: str
    source: str
    gains: Gains
    proportional: tuple[str, ...] = ()
    integral: str = ""

    @property
    def label(self) -> str:
        """The name as printed."""
        return ARMS[self.name].label

    def make(self, target: float) -> TargetController:
        """A controller with the first gains. Its first coefficient is set later."""
        bounds = {"min_coef": MIN_COEF, "max_coef": MAX_COEF}
        make: Any = CONTROLLERS[self.name]
        made: TargetController = make(1.0, target, **{"unit": "sequence", **bounds, **self.gains})
        return made

    def scaled(self, gains: Gains, factor: Tensor, balance: Tensor) -> Gains:
        """The gains times a factor. A shorter horizon and a larger step count as larger gains."""
        new = {name: gains[name] * factor for name in self.proportional}
        if self.integral:
            new[self.integral] = gains[self.integral] * factor * balance
        if "horizon" in gains:
            new["horizon"] = gains["horizon"] / factor
        if "factor" in gains:
            new["factor"] = torch.pow(float(gains["factor"]), factor)
        return new


CANDIDATES = (
    # lm-human-preferences: 512 sequences a batch, a horizon of 10,000
    Candidate("adaptive", "published", {"horizon": 10_000 * BATCH / 512}),
    Candidate("exponential", "default", {"gain": 0.1}, ("gain",)),
    Candidate("nupi", "default", {"kp": 1.0, "ki": 0.1}, ("kp",), "ki"),
    # omnisafe's PIDLagrangian, for costs whose limit is 25; klfast's ki is a quarter of it
    Candidate(
        "pid-lagrangian", "published", {"kp": 0.1, "ki": 0.01, "kd": 0.01}, ("kp", "kd"), "ki"
    ),
    Candidate("dual", "default", {"lr": 0.03}, ("lr",)),
    # Schulman et al. 2017: after every batch
    Candidate("doubling", "published", {"factor": 2.0, "every": 1}),
    # Shao et al. 2020, the language model: ki is 1e-4 a nat, and the target here 6 nats
    Candidate("control-vae", "published", {"kp": 0.01, "ki": 6e-4}, ("kp",), "ki"),
)
