"""The rules: pure functions from a measured KL to the next coefficient.

A rule is ``rule(ops, settings, state, kl, n_steps) -> state``:

- ``ops``: the arithmetic of floats or of tensors (``klfast.controllers.arithmetic``);
- ``settings``: by attribute: numbers of that arithmetic;
- ``state``: the coefficient under ``"value"``, and what else the rule remembers, numbers by name;
- ``kl``: the measured KL in nats, finite;
- ``n_steps``: the number of sequences in the batch.

The host's controllers and those on a device share these functions, so they have the same bits.
``advance`` puts a rule between the options that all controllers have. The error of a rule is
relative, ``e = clip(kl / target - 1, -clip, clip)``: gains then mean the same per sequence and per
token, and one wild batch cannot throw the coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from klfast.controllers.arithmetic import Arithmetic, Number

State: TypeAlias = dict[str, Number]
Rule: TypeAlias = Callable[[Arithmetic, Any, State, Number, Number], State]
Limit: TypeAlias = Callable[[Arithmetic, Any, Number, Number], Number]


class Plan(NamedTuple):
    """A rule and the options around it.

    Attributes:
        rule: moves the coefficient.
        limit: (ops, settings, old, new) -> the new coefficient within its bounds.
        smooths: the rule sees a moving average of the KL, with ``settings.ema``.
        rests: nothing moves while the KL is within ``settings.dead_band``.
        leaves_zero: a coefficient of 0 acts as ``settings.floor``.
    """

    rule: Rule
    limit: Limit
    smooths: bool = False
    rests: bool = False
    leaves_zero: bool = False


def advance(
    ops: Arithmetic, plan: Plan, settings: Any, state: State, kl: Number, n_steps: Number
) -> State:
    """The state after a batch of a finite KL."""
    if plan.smooths:
        state = _smoothed(ops, settings, state, kl)
        kl = state["kl_ema"]
    acting = state
    if plan.leaves_zero:
        acting = {**state, "value": ops.maximum(state["value"], settings.floor)}
    new = plan.rule(ops, settings, acting, kl, n_steps)
    new = {**new, "value": plan.limit(ops, settings, state["value"], new["value"])}
    if plan.rests:
        at_rest = abs(kl / settings.target - 1) <= settings.dead_band
        new = {name: ops.where(at_rest, state[name], new[name]) for name in new}
    return new


def _smoothed(ops: Arithmetic, settings: Any, state: State, kl: Number) -> State:
    """``kl_ema = ema * kl_ema + (1 - ema) * kl``, of the first KL that KL."""
    average = settings.ema * state["kl_ema"] + (1 - settings.ema) * kl
    average = ops.where(state["measured"] == 0, kl, average)
    return {**state, "kl_ema": average, "measured": state["measured"] + 1}


# Limits


def bounded(ops: Arithmetic, settings: Any, old: Number, new: Number) -> Number:
    """``new`` within ``[lowest, highest]``; ``old`` for NaN, which inf - inf gives."""
    number = ops.where(new == new, new, old)  # only NaN differs from itself
    return ops.minimum(ops.maximum(number, settings.lowest), settings.highest)


def bounded_or_zero(ops: Arithmetic, settings: Any, old: Number, new: Number) -> Number:
    """0 or within ``[floor, max_coef]``: what would fall below the floor is 0.

    A coefficient of 0, which acted as the floor, stays 0 unless the rule raised it above.
    """
    number = ops.minimum(ops.where(new == new, new, old), settings.highest)
    is_off = (number < settings.floor) | ((old == 0) & (number <= settings.floor))
    return ops.where(is_off, 0.0, number)


def bounded_or_absorbed(ops: Arithmetic, settings: Any, old: Number, new: Number) -> Number:
    """``bounded``, but 0 stays 0."""
    return ops.where(old == 0, 0.0, bounded(ops, settings, old, new))


# Rules of their sources, see the controllers


def fixed(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """The coefficient stays."""
    return state


def adaptive(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value *= 1 + e * n_steps / horizon``."""
    return {
        **state,
        "value": state["value"] * (1 + _error(ops, settings, kl) * n_steps / settings.horizon),
    }


def exponential(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value *= exp(gain * (kl - target))``."""
    return {**state, "value": state["value"] * ops.exp(settings.gain * (kl - settings.target))}


def dual(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value *= exp(lr * e)``."""
    return {**state, "value": state["value"] * ops.exp(settings.lr * _error(ops, settings, kl))}


def doubling(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """In every ``every``-th batch ``value *= factor`` above the band, ``/= factor`` below it."""
    value, waited = state["value"], state["waited"] + 1
    acts = waited >= settings.every
    is_high = kl > settings.threshold * settings.target
    is_low = kl < settings.target / settings.threshold
    moved = ops.where(
        is_high, value * settings.factor, ops.where(is_low, value / settings.factor, value)
    )
    return {
        **state,
        "value": ops.where(acts, moved, value),
        "waited": ops.where(acts, 0.0, waited),
    }


def nupi(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value += ki * e + kp * (xi - xi_before)``."""
    step, remembered = _nupi_step(ops, settings, state, kl)
    return {**state, **remembered, "value": state["value"] + step}


def nupi_of_log(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``log(value) += ki * e + kp * (xi - xi_before)``."""
    step, remembered = _nupi_step(ops, settings, state, kl)
    return {**state, **remembered, "value": state["value"] * ops.exp(step)}


def _nupi_step(ops: Arithmetic, settings: Any, state: State, kl: Number) -> tuple[Number, State]:
    error = _error(ops, settings, kl)
    before = ops.where(state["errors"] == 0, error, state["xi"])
    xi = before + (1 - settings.nu) * (error - before)
    step = settings.ki * error + settings.kp * (xi - before)
    return step, {"xi": xi, "errors": state["errors"] + 1}


def pid(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value = kp * P + I + kd * max(0, D)``; the delayed costs are a shift register."""
    error = _error(ops, settings, kl)
    integral = _within(ops, settings, state["integral"] + settings.ki * error)
    smoothed_error = settings.p_ema * state["error_ema"] + (1 - settings.p_ema) * error
    cost = settings.d_ema * state["cost_ema"] + (1 - settings.d_ema) * (error + 1)
    delayed = sorted((name for name in state if name.startswith("cost_ago_")), key=_age)
    rise = ops.maximum(cost - state[delayed[-1]], 0.0)
    ages = dict(zip(delayed, (cost, *(state[name] for name in delayed)), strict=False))
    return {
        **state,
        **ages,
        "integral": integral,
        "error_ema": smoothed_error,
        "cost_ema": cost,
        "value": settings.kp * smoothed_error + integral + settings.kd * rise,
    }


def _age(name: str) -> int:
    return int(name.rpartition("_")[-1])


def control_vae(ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value = kp / (1 + exp(-e)) + I``; I rests while it would drive a bound further."""
    error, value = _error(ops, settings, kl), state["value"]
    is_stuck = ((value >= settings.highest) & (error > 0)) | (
        (value <= settings.lowest) & (error < 0)
    )
    moved = state["integral"] + settings.ki * error
    integral = ops.where(is_stuck, state["integral"], moved)
    return {
        **state,
        "integral": integral,
        "value": settings.kp / (1 + ops.exp(-error)) + integral,
    }


def _error(ops: Arithmetic, settings: Any, kl: Number) -> Number:
    """``e = clip(kl / target - 1, -clip, clip)``."""
    return ops.minimum(ops.maximum(kl / settings.target - 1, -settings.clip), settings.clip)


def _within(ops: Arithmetic, settings: Any, integral: Number) -> Number:
    """An integral within what the coefficient may be, so that it does not wind up."""
    return ops.minimum(ops.maximum(integral, 0.0), settings.highest)


# Schedules

Curve: TypeAlias = Callable[[Arithmetic, Any, Number], Number]
"""(ops, settings, step) -> what a schedule multiplies by."""


@dataclass(frozen=True)
class Scheduled:
    """The rule ``value = init_kl_coef * curve(step)``."""

    curve: Curve

    def __call__(
        self, ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number
    ) -> State:
        step = state["step"] + 1
        return {
            **state,
            "step": step,
            "value": settings.init_kl_coef * self.curve(ops, settings, step),
        }


class _Retargeted:
    """The settings of a controller, with another target."""

    def __init__(self, settings: Any, target: Number) -> None:
        self._settings = settings
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)


@dataclass(frozen=True)
class ScheduledTarget:
    """The rule of a plan, with ``target * curve(step)`` for its target."""

    curve: Curve
    plan: Plan

    def __call__(
        self, ops: Arithmetic, settings: Any, state: State, kl: Number, n_steps: Number
    ) -> State:
        target = settings.target * self.curve(ops, settings, state["step"])
        retargeted = _Retargeted(settings._inner, target)
        new = advance(ops, self.plan, retargeted, state, kl, n_steps)
        return {**new, "step": state["step"] + 1}


def linear(ops: Arithmetic, settings: Any, step: Number) -> Number:
    """A line from ``start`` to 1 in ``warmup`` steps, then one to ``final`` in ``steps``."""
    return _warmed(ops, settings, step, _progress(ops, settings, step))


def cosine(ops: Arithmetic, settings: Any, step: Number) -> Number:
    """A line from ``start`` to 1 in ``warmup`` steps, then half a cosine to ``final``."""
    return _warmed(ops, settings, step, 1 - _half_cosine(ops, _progress(ops, settings, step)))


def _progress(ops: Arithmetic, settings: Any, step: Number) -> Number:
    """The part of ``steps`` that is over, between 0 and 1."""
    return ops.minimum(ops.maximum(step - settings.warmup, 0.0) / settings.steps, 1.0)


def _warmed(ops: Arithmetic, settings: Any, step: Number, done: Number) -> Number:
    warm = settings.start + (1 - settings.start) * (step / ops.maximum(settings.warmup, 1.0))
    return ops.where(step < settings.warmup, warm, 1 + (settings.final - 1) * done)


_SINE = tuple(1 / ((2 * n) * (2 * n + 1)) for n in range(8, 0, -1))


def _half_cosine(ops: Arithmetic, t: Number) -> Number:
    """(1 + cos(pi t)) / 2 for t in [0, 1], by the series of the sine up to pi / 4."""
    is_late = t > 0.5
    angle = ops.where(is_late, 1 - t, t) * (math.pi / 2)
    square = angle * angle
    series = 1 - square * _SINE[0]
    for term in _SINE[1:]:
        series = 1 - square * term * series
    sine = angle * series
    return ops.where(is_late, sine * sine, 1 - sine * sine)
