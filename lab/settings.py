"""The settings that decide a run's numbers, and the arms of the experiment."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from klfast.args.rollout_presets import PRESETS
from klfast.controllers import CONTROLLERS
from klfast.controllers.base import CoefficientController
from klfast.controllers.target import FixedKLController


class CompareError(Exception):
    """A mistake that the user can correct. Its text is the whole message."""


DEFAULT_ARMS = (
    *("none", "fixed-low", "fixed-high", "adaptive", "exponential", "nupi"),
    *("stale", "corrected"),
)


@dataclass(frozen=True)
class Settings:
    """The settings of a run. With the same text, versions and processor they give equal numbers.

    Lengths are in tokens, KL in nats per sequence.

    Attributes:
        seed: of the weights, the windows, the prompts and the samples.
        steps: policy-gradient steps of each arm.
        target: the KL that the steering arms aim at.
        letter: the letter whose share of a continuation's characters is the reward.
        gain: of the exponential controller, as the change of log(coefficient) in a step whose KL is
            off by the whole target.
        clip: the penalty's ``log_ratio_clip``, in nats; 0 for none.
        precision: of weights and arithmetic, ``"float32"`` or ``"float64"``.
        staleness: the sampler of the arms ``stale`` and ``corrected`` gets the policy's weights
            after so many steps.
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


@dataclass(frozen=True)
class Arm:
    """A controller of the coefficient, and a sampler.

    Attributes:
        label: as printed in tables.
        kind: the class of the controller.
        arguments: of the controller, by name.
        steers: True if the controller aims at the target.
        is_off_policy: True if its tokens come from a sampler that differs from the policy.
        is_corrected: True if its loss is corrected for that.
    """

    label: str
    kind: Callable[..., CoefficientController]
    arguments: Callable[[Settings], dict[str, Any]]
    steers: bool = False
    is_off_policy: bool = False
    is_corrected: bool = False

    def controller(self, settings: Settings) -> CoefficientController:
        return self.kind(**self.arguments(settings))


def _fixed(label: str, coef: Callable[[Settings], float], **of_sampler: bool) -> Arm:
    return Arm(label, FixedKLController, lambda s: {"kl_coef": coef(s)}, **of_sampler)


def _steering(
    label: str, name: str, options: Callable[[Settings], dict[str, float]] = lambda s: {}
) -> Arm:
    def arguments(s: Settings) -> dict[str, Any]:
        return {"init_kl_coef": s.init_coef, "target": s.target, "unit": "sequence", **options(s)}

    return Arm(label, CONTROLLERS[name], arguments, steers=True)


ARMS = {
    "none": _fixed("no penalty", lambda s: 0.0),
    "fixed-low": _fixed("fixed, low", lambda s: s.low_coef),
    "fixed-high": _fixed("fixed, high", lambda s: s.high_coef),
    "adaptive": _steering("adaptive (Ziegler)", "adaptive", lambda s: {"horizon": s.horizon}),
    "exponential": _steering("exponential", "exponential", lambda s: {"gain": s.gain / s.target}),
    "nupi": _steering("nuPI", "nupi"),
    "pid-lagrangian": _steering("PID Lagrangian", "pid-lagrangian"),
    "dual": _steering("dual ascent", "dual"),
    "doubling": _steering("doubling", "doubling"),
    "control-vae": _steering("ControlVAE", "control-vae"),
    "stale": _fixed("stale sampler", lambda s: s.low_coef, is_off_policy=True),
    "corrected": _fixed(
        "stale, corrected", lambda s: s.low_coef, is_off_policy=True, is_corrected=True
    ),
}

PARTNER = "fixed-low"  # the on-policy arm that differs from the off-policy arms only in its sampler


def on_policy(names: Iterable[str]) -> list[str]:
    """The arms whose tokens come from the policy itself."""
    return [name for name in names if not ARMS[name].is_off_policy]


def off_policy(names: Iterable[str]) -> list[str]:
    """The arms whose tokens come from another sampler."""
    return [name for name in names if ARMS[name].is_off_policy]


_POSITIVE = (
    *("target", "low_coef", "high_coef", "init_coef", "horizon", "gain"),
    *("learning_rate", "pretrain_learning_rate"),
)


def check_settings(settings: Settings) -> None:
    """Raises :class:`CompareError` for the first setting that makes no sense."""
    for each in fields(settings):
        name, value = each.name, getattr(settings, each.name)
        least = 0 if name == "seed" else 1
        if each.type is int and not least <= value < 2**63:
            bound = f">= {least}" if value < least else f"<= {2**63 - 1}"
            raise CompareError(f"{name} must be a whole number {bound}, got {value!r}")
        if name in _POSITIVE and not 0 < value < math.inf:
            raise CompareError(f"{name} must be a finite number > 0, got {value!r}")
    if not 0 <= settings.clip < math.inf:
        raise CompareError(f"clip must be a finite number >= 0, got {settings.clip!r}")
    _check_name("precision", settings.precision, ("float32", "float64"))
    _check_name("correction", settings.correction, PRESETS)
    if not settings.arms:
        raise CompareError(f"no arm given; expected some of {', '.join(map(repr, ARMS))}")
    for arm in settings.arms:
        _check_name("arm", arm, ARMS)
        if settings.arms.count(arm) > 1:
            raise CompareError(f"arm {arm!r} is given more than once")
    if not on_policy(settings.arms):
        raise CompareError(
            f"arms must have one that samples by the policy itself, got {settings.arms!r}"
        )
    if len(settings.letter) != 1 or not settings.letter.isascii() or not settings.letter.islower():
        raise CompareError(f"letter must be one of 'a' to 'z', got {settings.letter!r}")


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        expected = ", ".join(map(repr, known))
        raise CompareError(f"unknown {what} {name!r}; expected one of {expected}")


def settings_to_json(settings: Settings) -> dict[str, Any]:
    return {**asdict(settings), "arms": list(settings.arms)}


def settings_from_json(record: object) -> Settings:
    """The settings that :func:`settings_to_json` wrote. Raises ValueError for anything else."""
    if not isinstance(record, dict) or set(record) != {each.name for each in fields(Settings)}:
        raise ValueError("the settings are incomplete or of another version")
    settings = Settings(**{**record, "arms": tuple(record["arms"])})
    check_settings(settings)
    return settings
