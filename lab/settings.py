"""Everything that decides a run's numbers, as one plain value; and the error of a user."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from klfast.rollout.presets import PRESETS

OFF_POLICY_ARMS = ("stale", "corrected")
DEFAULT_ARMS = (
    *("none", "fixed-low", "fixed-high", "adaptive", "exponential"),
    *OFF_POLICY_ARMS,
)
ARM_NAMES = (*DEFAULT_ARMS, "nupi", "pid-lagrangian", "dual", "doubling", "control-vae")


class CompareError(Exception):
    """A mistake that the user can mend; its text is the whole message."""


class LeadersError(CompareError):
    """The leading rank's mistake on another rank, which need not say it again."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run: equal settings, text, versions and processors give equal
    numbers.

    Lengths are in tokens, KL in nats per sequence.

    Attributes:
        seed: of the weights, the windows, the prompts and the samples.
        steps: policy-gradient steps of each arm.
        arms: their names, in the order in which they run.
        target: the KL that the steering arms aim at.
        letter: the reward is its share of a continuation's characters.
        low_coef, high_coef: the coefficients of the fixed arms.
        init_coef: where the steering arms begin.
        horizon: of the adaptive rule.
        gain: of the exponential rule, as the change of log(coefficient) in a step whose KL is off
            by the whole target.
        clip: the penalty's ``log_ratio_clip``, in nats; 0 for none.
        precision: of weights and arithmetic, ``"float32"`` or ``"float64"``.
        staleness: steps after which the sampler of the arms ``stale`` and ``corrected`` gets the
            policy's weights.
        correction: the preset of ``klfast.rollout_correction`` in the arm ``corrected``.
        prompts, group: a batch is ``prompts`` prompts with ``group`` continuations each.
    """

    seed: int = 0
    steps: int = 100
    arms: tuple[str, ...] = DEFAULT_ARMS
    target: float = 6.0
    letter: str = "e"

    low_coef: float = 0.012
    high_coef: float = 0.05
    init_coef: float = 0.03
    horizon: float = 320.0
    gain: float = 0.15
    clip: float = 0.0
    staleness: int = 8
    correction: str = "tis"

    prompts: int = 10
    group: int = 4
    prompt_length: int = 16
    continuation_length: int = 24
    learning_rate: float = 1.5e-3
    precision: str = "float32"

    pretrain_steps: int = 600
    pretrain_batch: int = 32
    pretrain_learning_rate: float = 3e-3
    layers: int = 2
    width: int = 96
    heads: int = 4
    held_out_windows: int = 16

    @property
    def context(self) -> int:
        return self.prompt_length + self.continuation_length

    @property
    def batch(self) -> int:
        return self.prompts * self.group


PRECISIONS = ("float32", "float64")
_LEAST = {"seed": 0, "group": 2}
_MOST = 2**63 - 1  # the largest int64
_POSITIVE = (
    *("target", "low_coef", "high_coef", "init_coef", "horizon", "gain"),
    *("learning_rate", "pretrain_learning_rate"),
)


def check_settings(settings: Settings) -> None:
    """Raises :class:`CompareError` for the first setting that makes no sense."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.type == "int":
            least = _LEAST.get(field.name, 1)
            if type(value) is not int or value < least:
                raise CompareError(f"{field.name} must be a whole number >= {least}, got {value!r}")
            if value > _MOST:
                raise CompareError(f"{field.name} must be a whole number <= {_MOST}, got {value!r}")
        if field.name in _POSITIVE and not (
            isinstance(value, (int, float)) and math.isfinite(value) and value > 0
        ):
            raise CompareError(f"{field.name} must be a finite number > 0, got {value!r}")
    if not (isinstance(settings.clip, (int, float)) and 0 <= settings.clip < math.inf):
        raise CompareError(f"clip must be a finite number >= 0, got {settings.clip!r}")
    if settings.precision not in PRECISIONS:
        expected = ", ".join(map(repr, PRECISIONS))
        raise CompareError(f"unknown precision {settings.precision!r}; expected one of {expected}")
    if settings.correction not in PRESETS:
        expected = ", ".join(map(repr, PRESETS))
        raise CompareError(
            f"unknown correction {settings.correction!r}; expected one of {expected}"
        )
    _check_arms(settings.arms)
    if len(settings.letter) != 1 or not settings.letter.isascii() or not settings.letter.islower():
        raise CompareError(f"letter must be one of 'a' to 'z', got {settings.letter!r}")
    if settings.width % settings.heads:
        raise CompareError(
            f"width must be a multiple of heads={settings.heads}, got {settings.width}"
        )


def _check_arms(arms: tuple[str, ...]) -> None:
    expected = ", ".join(map(repr, ARM_NAMES))
    if not arms:
        raise CompareError(f"no arm given; expected some of {expected}")
    for name in arms:
        if name not in ARM_NAMES:
            raise CompareError(f"unknown arm {name!r}; expected one of {expected}")
        if arms.count(name) > 1:
            raise CompareError(f"arm {name!r} is given more than once")
    if set(arms) <= set(OFF_POLICY_ARMS):
        raise CompareError(f"arms must have one that samples by the policy itself, got {arms!r}")


def settings_to_json(settings: Settings) -> dict[str, Any]:
    return {**asdict(settings), "arms": list(settings.arms)}


def settings_from_json(record: object) -> Settings:
    """The settings that :func:`settings_to_json` wrote; ValueError for anything else."""
    if not isinstance(record, dict) or set(record) != {field.name for field in fields(Settings)}:
        raise ValueError("the settings are incomplete or of another version")
    settings = Settings(**{**record, "arms": tuple(record["arms"])})
    check_settings(settings)
    return settings
