"""Controllers: rules that steer the coefficient of the KL penalty after each batch.

A training loop takes its step with ``controller.value`` and then reports the KL it measured::

    controller = klfast.AdaptiveKLController(init_kl_coef=0.1, target=6.0)
    loss, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, mask,
        reduction="seq-mean-token-sum", coef=controller.value, return_stats=True,
    )
    ...
    controller.update(stats)

Controllers are plain Python and keep no tensor; reading a KL that lives on a GPU waits for it. In
data-parallel training give every rank the same global mean, or their coefficients drift apart.

A checkpoint (``state_dict``) holds what a run has changed: the coefficient and the count of skipped
values. The settings (target, horizon, bounds, ...) are the constructor's: a run resumed with the
same ones continues bit for bit, and one resumed with a new target steers to the new target from the
coefficient it had reached.
"""

from __future__ import annotations

import inspect
import math
import sys
import textwrap
import warnings
from abc import ABC, abstractmethod
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from klfast.checks.arguments import check_choice, check_number, shown
from klfast.stats import KLStats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AdaptiveKLController",
    "ExponentialKLController",
    "FixedKLController",
    "get_kl_controller",
]

Unit = Literal["sequence", "token"]
ADAPTIVE_OPTIONS = ("clip", "unit", "min_coef", "max_coef")
STATE_VERSION = 1


def to_scalar(value: Any) -> Any:
    """Return what a 0-dim tensor or numpy scalar holds; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def warn_caller(message: str) -> None:
    """Issue a RuntimeWarning that names the line outside klfast which led here."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "klfast":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def check_count(argument: str, value: object, least: int) -> int:
    """Return ``value`` as an int, or raise unless it is an integer >= ``least`` within float64."""
    count = to_scalar(value)
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise TypeError(f"{argument} must be an integer >= {least}, got {shown(value)}")
    count = int(count)
    if not least <= count <= sys.float_info.max:
        raise ValueError(
            f"{argument} must be an integer >= {least} within float64, got {shown(value)}"
        )
    return count


class KLReader(ABC):
    """What controllers and monitor share: reading a KL, skipping a bad one, framing a state."""

    _kind: ClassVar[str]
    _output: ClassVar[str]  # the name of what ``update`` returns

    def __init__(self, unit: Unit) -> None:
        check_choice("unit", unit, get_args(Unit))
        self.unit = unit
        self._skipped = 0

    @property
    def skipped(self) -> int:
        """How many values were left out because they were NaN or infinite."""
        return self._skipped

    def _read(self, current: float | Tensor | KLStats) -> float | None:
        """Return ``current`` as a float; None, counted and warned of once, if it is not finite."""
        if isinstance(current, KLStats):
            if not current.length.any():
                current = math.nan  # a batch that keeps no token has no mean, not one of 0
            elif self.unit == "token":
                current = current.token_mean()
            else:
                current = current.sequence_mean()
        kl = to_scalar(current)
        if isinstance(kl, bool) or not isinstance(kl, Real):
            got = textwrap.shorten(repr(current), 60, placeholder="...")
            raise TypeError(f"current must be a number, a 0-dim tensor or a KLStats, got {got}")
        try:
            kl = float(kl)
        except OverflowError:  # an integer or a fraction beyond float64
            kl = math.inf if kl > 0 else -math.inf
        if math.isfinite(kl):
            return kl
        self._skipped += 1
        if self._skipped == 1:
            warn_caller(
                f"{type(self).__name__} skipped a KL of {kl}; .skipped counts any further ones"
            )
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a run has changed, as plain JSON."""

    def _state_frame(self) -> dict[str, Any]:
        return {"kind": self._kind, "version": STATE_VERSION, "skipped": self._skipped}

    def _check_state_frame(self, state: dict[str, Any]) -> int:
        """Return ``skipped``, or raise unless kind, version and keys are this object's."""
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict, got {type(state).__name__}")
        for key, expected in (("kind", self._kind), ("version", STATE_VERSION)):
            got = state.get(key)
            if type(got) is not type(expected) or got != expected:
                raise ValueError(f"state[{key!r}] must be {expected!r}, got {got!r}")
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"state must have keys {[*self.state_dict()]}, got {[*state]}")
        return check_count("state['skipped']", state["skipped"], least=0)

    def __repr__(self) -> str:
        settings = (name for name in vars(self) if not name.startswith("_"))
        names = (self._output, *settings, "skipped")
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({fields})"


class CoefficientController(KLReader):
    """A coefficient inside its bounds, and the rule that moves it."""

    _output = "value"
    min_coef: float = 0.0
    max_coef: float | None = None
    _value: float

    @property
    def value(self) -> float:
        """The coefficient of the KL penalty."""
        return self._value

    @abstractmethod
    def _next_value(self, kl: float, n_steps: int | None) -> float:
        """The rule: the next coefficient, before the bounds."""

    def _check_value(self, argument: str, value: object) -> float:
        number = check_number(argument, value, least=self.min_coef)
        if self.max_coef is not None and number > self.max_coef:
            raise ValueError(f"{argument} must be <= max_coef={self.max_coef}, got {value!r}")
        return number

    def _check_n_steps(self, n_steps: object) -> int:
        return check_count("n_steps", n_steps, least=0)

    def _bounded(self, value: float) -> float:
        highest = sys.float_info.max if self.max_coef is None else self.max_coef
        return min(max(value, self.min_coef), highest)

    def update(self, current: float | Tensor | KLStats, n_steps: int | None = None) -> float:
        """Move the coefficient after a batch.

        Args:
            current: the batch's mean KL in nats: a number, a 0-dim tensor, or a ``KLStats``, whose
                mean is taken by ``unit``. NaN, inf or a number beyond float64 changes nothing: it
                is counted in ``skipped`` and warned of once. So is a ``KLStats`` that keeps no
                token, which has no mean.
            n_steps: the number of sequences in the batch (over all ranks); those of the ``KLStats``
                by default. Only ``AdaptiveKLController`` uses it, and needs it with a plain number.

        Returns:
            The new coefficient, ``value``.

        Raises:
            TypeError: ``current`` is not a number; ``n_steps`` is not an integer, or is missing.
            ValueError: ``n_steps`` is negative or beyond float64.
        """
        if n_steps is not None:
            n_steps = self._check_n_steps(n_steps)
        elif isinstance(current, KLStats):
            n_steps = current.kl.numel()
        kl = self._read(current)
        if kl is not None:
            self._value = self._bounded(self._next_value(kl, n_steps))
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient and the count of skipped values, as plain JSON; no settings."""
        return {**self._state_frame(), "value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` returned; the settings stay those of this object.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` is of another kind or version, lacks a key or has an unknown one,
                or its coefficient is outside this object's bounds. The object is then unchanged.
        """
        skipped = self._check_state_frame(state)
        self._value = self._check_value("state['value']", state["value"])
        self._skipped = skipped


class FixedKLController(CoefficientController):
    """A coefficient that never changes, behind the interface of those that do.

    Args:
        kl_coef: the coefficient, finite and >= 0; 0 switches the penalty off.

    Raises:
        TypeError: ``kl_coef`` is not a number.
        ValueError: ``kl_coef`` is negative, NaN or infinite.
    """

    _kind = "fixed"

    def __init__(self, kl_coef: float) -> None:
        super().__init__(unit="sequence")
        self._value = self._check_value("kl_coef", kl_coef)

    def _next_value(self, kl: float, n_steps: int | None) -> float:
        return self._value


class _TargetController(CoefficientController):
    """A controller that multiplies its coefficient, which is therefore > 0, to reach a target."""

    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        unit: Unit,
        min_coef: float,
        max_coef: float | None,
    ) -> None:
        super().__init__(unit)
        self.target = check_number("target", target, above=0)
        self.min_coef = check_number("min_coef", min_coef, above=0)
        if max_coef is not None:
            max_coef = check_number("max_coef", max_coef, least=self.min_coef)
        self.max_coef = max_coef
        self._value = self._check_value("init_kl_coef", init_kl_coef)


class AdaptiveKLController(_TargetController):
    """The proportional rule of Ziegler et al.: the coefficient rises while KL exceeds its target.

    ``value *= 1 + clip(current / target - 1, -clip, clip) * n_steps / horizon``, then limited to
    ``[min_coef, max_coef]``. Within them it is the published rule bit for bit, in float64. They
    keep it out of that rule's two traps: 0, which no product leaves, and a negative coefficient,
    which ``n_steps > horizon / clip`` leads to.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``: about 6 per sequence or 0.1 per token.
        horizon: > 0; a batch of n sequences moves the coefficient by at most ``clip * n / horizon``
            of itself.
        clip: > 0; the largest relative error that counts.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"sequence"`` (of the sums over
            each sequence) or ``"token"`` (over all tokens).
        min_coef: the lower bound, > 0.
        max_coef: the upper bound, >= ``min_coef``; None for none.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019,
    arXiv:1909.08593), section 2.2, and its code, lm-human-preferences.
    """

    _kind = "adaptive"

    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        horizon: float = 10_000,
        *,
        clip: float = 0.2,
        unit: Unit = "sequence",
        min_coef: float = 1e-6,
        max_coef: float | None = None,
    ) -> None:
        super().__init__(init_kl_coef, target, unit, min_coef, max_coef)
        self.horizon = check_number("horizon", horizon, above=0)
        self.clip = check_number("clip", clip, above=0)

    def _next_value(self, kl: float, n_steps: int | None) -> float:
        if n_steps is None:
            raise TypeError("n_steps must be given when current is not a KLStats, got None")
        proportional_error = min(max(kl / self.target - 1, -self.clip), self.clip)
        return self._value * (1 + proportional_error * n_steps / self.horizon)


class ExponentialKLController(_TargetController):
    """The exponential rule: ``log(value)`` moves by the distance of KL from its target.

    ``value *= exp(gain * (current - target))``, then limited to ``[min_coef, max_coef]``. One step
    per ``update``, whatever the size of the batch.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``.
        gain: > 0; the change of ``log(value)`` per nat and update.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"token"`` (over all tokens) or
            ``"sequence"`` (of the sums over each sequence).
        min_coef: the lower bound, > 0.
        max_coef: the upper bound, >= ``min_coef``; None for none.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.
    """

    _kind = "exponential"

    def __init__(
        self,
        init_kl_coef: float = 0.1,
        target: float = 0.1,
        *,
        gain: float = 0.1,
        unit: Unit = "token",
        min_coef: float = 1e-4,
        max_coef: float | None = 10.0,
    ) -> None:
        super().__init__(init_kl_coef, target, unit, min_coef, max_coef)
        self.gain = check_number("gain", gain, above=0)

    def _next_value(self, kl: float, n_steps: int | None) -> float:
        try:
            return self._value * math.exp(self.gain * (kl - self.target))
        except OverflowError:  # beyond float64, where math.exp raises; the upper bound takes over
            return math.inf


def get_kl_controller(
    init_kl_coef: float, target: float | None = None, horizon: float = 10_000, **options: Any
) -> FixedKLController | AdaptiveKLController:
    """Return a fixed controller if ``target`` is None, else an adaptive one.

    Args:
        init_kl_coef: the coefficient, or the first one.
        target: the KL to hold in nats per sequence (per token with ``unit="token"``), or None.
        horizon: of ``AdaptiveKLController``; a fixed coefficient has no use for it.
        **options: ``clip``, ``unit``, ``min_coef``, ``max_coef`` of ``AdaptiveKLController``.

    Raises:
        TypeError: an option is unknown or given without a target, or of the wrong type.
        ValueError: a setting is out of its range.
    """
    check_options(target, options)
    if target is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(init_kl_coef, target, horizon, **options)


def check_options(target: float | None, options: dict[str, Any]) -> None:
    """Raise unless all options of a factory are known, and there are none without a target."""
    for option in options:
        if option not in ADAPTIVE_OPTIONS:
            expected = ", ".join(map(repr, ADAPTIVE_OPTIONS))
            raise TypeError(f"unknown option {option!r}; expected one of {expected}")
    if target is None and options:
        raise TypeError(f"target must be a number when {', '.join(options)} is given, got None")
