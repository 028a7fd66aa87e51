"""Everything that decides a run's numbers, as one plain value; and the errors a user can cause."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any


class CompareError(Exception):
    """A mistake that the user can mend; its text is the whole message."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Two runs with equal settings, text and versions give equal numbers.

    Lengths are in tokens, KL in nats.
    """

    seed: int = 0
    steps: int = 100
    arms: tuple[str, ...] = ("none", "fixed-low", "fixed-high", "adaptive", "exponential")
    target: float = 6.0
    letter: str = "e"

    low_coef: float = 0.001
    high_coef: float = 0.05
    init_coef: float = 0.01
    horizon: float = 256.0
    gain: float = 0.03

    prompts: int = 16
    group: int = 4
    prompt_length: int = 16
    continuation_length: int = 32
    learning_rate: float = 1e-3

    pretrain_steps: int = 600
    pretrain_batch: int = 32
    pretrain_learning_rate: float = 3e-3
    layers: int = 2
    width: int = 96
    heads: int = 4
    held_out_windows: int = 48

    @property
    def context(self) -> int:
        return self.prompt_length + self.continuation_length

    @property
    def batch(self) -> int:
        return self.prompts * self.group
