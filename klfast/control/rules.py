"""The rules: pure functions from a measured KL to the next coefficient.

A rule is ``rule(on, its, state, kl, n_steps) -> state``:

- ``on``: the arithmetic of floats or of tensors (``klfast.control.arithmetic``);
- ``its``: the settings, by attribute: numbers of that arithmetic;
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

from klfast.control.arithmetic import Arithmetic, Number

State: TypeAlias = dict[str, Number]
Rule: TypeAlias = Callable[[Arithmetic, Any, State, Number, Number], State]
Limit: TypeAlias = Callable[[Arithmetic, Any, Number, Number], Number]


class Plan(NamedTuple):
    """A rule and the options around it.

    Attributes:
        rule: moves the coefficient.
        limit: (on, its, old, new) -> the new coefficient within its bounds.
        smooths: the rule sees a moving average of the KL, with ``its.ema``.
        rests: nothing moves while the KL is within ``its.dead_band``.
        leaves_zero: a coefficient of 0 acts as ``its.floor``.
    """

    rule: Rule
    limit: Limit
    smooths: bool = False
    rests: bool = False
    leaves_zero: bool = False


def advance(
    on: Arithmetic, plan: Plan, its: Any, state: State, kl: Number, n_steps: Number
) -> State:
    """The state after a batch of a finite KL."""
    if plan.smooths:
        state = _smoothed(on, its, state, kl)
        kl = state["kl_ema"]
    acting = state
    if plan.leaves_zero:
        acting = {**state, "value": on.maximum(state["value"], its.floor)}
    new = plan.rule(on, its, acting, kl, n_steps)
    new = {**new, "value": plan.limit(on, its, state["value"], new["value"])}
    if plan.rests:
        at_rest = abs(kl / its.target - 1) <= its.dead_band
        new = {name: on.where(at_rest, state[name], new[name]) for name in new}
    return new


def _smoothed(on: Arithmetic, its: Any, state: State, kl: Number) -> State:
    """``kl_ema = ema * kl_ema + (1 - ema) * kl``, of the first KL that KL."""
    average = its.ema * state["kl_ema"] + (1 - its.ema) * kl
    average = on.where(state["measured"] == 0, kl, average)
    return {**state, "kl_ema": average, "measured": state["measured"] + 1}


# Limits


def bounded(on: Arithmetic, its: Any, old: Number, new: Number) -> Number:
    """``new`` within ``[lowest, highest]``; ``old`` for NaN, which inf - inf gives."""
    number = on.where(new == new, new, old)  # only NaN differs from itself
    return on.minimum(on.maximum(number, its.lowest), its.highest)


def bounded_or_zero(on: Arithmetic, its: Any, old: Number, new: Number) -> Number:
    """0 or within ``[floor, max_coef]``: what would fall below the floor is 0.

    A coefficient of 0, which acted as the floor, stays 0 unless the rule raised it above.
    """
    number = on.minimum(on.where(new == new, new, old), its.highest)
    is_off = (number < its.floor) | ((old == 0) & (number <= its.floor))
    return on.where(is_off, 0.0, number)


def bounded_or_absorbed(on: Arithmetic, its: Any, old: Number, new: Number) -> Number:
    """``bounded``, but 0 stays 0."""
    return on.where(old == 0, 0.0, bounded(on, its, old, new))


# Rules of their sources, see the controllers


def fixed(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """The coefficient stays."""
    return state


def adaptive(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value *= 1 + e * n_steps / horizon``."""
    return {**state, "value": state["value"] * (1 + _error(on, its, kl) * n_steps / its.horizon)}


def exponential(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value *= exp(gain * (kl - target))``."""
    return {**state, "value": state["value"] * on.exp(its.gain * (kl - its.target))}


def dual(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value *= exp(lr * e)``."""
    return {**state, "value": state["value"] * on.exp(its.lr * _error(on, its, kl))}


def doubling(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """In every ``every``-th batch ``value *= factor`` above the band, ``/= factor`` below it."""
    value, waited = state["value"], state["waited"] + 1
    acts = waited >= its.every
    is_high = kl > its.threshold * its.target
    is_low = kl < its.target / its.threshold
    moved = on.where(is_high, value * its.factor, on.where(is_low, value / its.factor, value))
    return {
        **state,
        "value": on.where(acts, moved, value),
        "waited": on.where(acts, 0.0, waited),
    }


def nupi(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value += ki * e + kp * (xi - xi_before)``."""
    step, remembered = _nupi_step(on, its, state, kl)
    return {**state, **remembered, "value": state["value"] + step}


def nupi_of_log(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``log(value) += ki * e + kp * (xi - xi_before)``."""
    step, remembered = _nupi_step(on, its, state, kl)
    return {**state, **remembered, "value": state["value"] * on.exp(step)}


def _nupi_step(on: Arithmetic, its: Any, state: State, kl: Number) -> tuple[Number, State]:
    error = _error(on, its, kl)
    before = on.where(state["errors"] == 0, error, state["xi"])
    xi = before + (1 - its.nu) * (error - before)
    step = its.ki * error + its.kp * (xi - before)
    return step, {"xi": xi, "errors": state["errors"] + 1}


def pid(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value = kp * P + I + kd * max(0, D)``; the delayed costs are a shift register."""
    error = _error(on, its, kl)
    integral = _within(on, its, state["integral"] + its.ki * error)
    smoothed_error = its.p_ema * state["error_ema"] + (1 - its.p_ema) * error
    cost = its.d_ema * state["cost_ema"] + (1 - its.d_ema) * (error + 1)
    delayed = sorted((name for name in state if name.startswith("cost_ago_")), key=_age)
    rise = on.maximum(cost - state[delayed[-1]], 0.0)
    ages = dict(zip(delayed, (cost, *(state[name] for name in delayed)), strict=False))
    return {
        **state,
        **ages,
        "integral": integral,
        "error_ema": smoothed_error,
        "cost_ema": cost,
        "value": its.kp * smoothed_error + integral + its.kd * rise,
    }


def _age(name: str) -> int:
    return int(name.rpartition("_")[-1])


def control_vae(on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number) -> State:
    """``value = kp / (1 + exp(-e)) + I``; I rests while it would drive a bound further."""
    error, value = _error(on, its, kl), state["value"]
    is_stuck = ((value >= its.highest) & (error > 0)) | ((value <= its.lowest) & (error < 0))
    moved = state["integral"] + its.ki * error
    integral = on.where(is_stuck, state["integral"], moved)
    return {
        **state,
        "integral": integral,
        "value": its.kp / (1 + on.exp(-error)) + integral,
    }


def _error(on: Arithmetic, its: Any, kl: Number) -> Number:
    """``e = clip(kl / target - 1, -clip, clip)``."""
    return on.minimum(on.maximum(kl / its.target - 1, -its.clip), its.clip)


def _within(on: Arithmetic, its: Any, integral: Number) -> Number:
    """An integral within what the coefficient may be, so that it does not wind up."""
    return on.minimum(on.maximum(integral, 0.0), its.highest)


# Schedules

Curve: TypeAlias = Callable[[Arithmetic, Any, Number], Number]
"""(on, its, step) -> what a schedule multiplies by."""


@dataclass(frozen=True)
class Scheduled:
    """The rule ``value = init_kl_coef * curve(step)``."""

    curve: Curve

    def __call__(
        self, on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number
    ) -> State:
        step = state["step"] + 1
        return {**state, "step": step, "value": its.init_kl_coef * self.curve(on, its, step)}


class _Retargeted:
    """The settings of a controller, with another target."""

    def __init__(self, its: Any, target: Number) -> None:
        self._its = its
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._its, name)


@dataclass(frozen=True)
class ScheduledTarget:
    """The rule of a plan, with ``target * curve(step)`` for its target."""

    curve: Curve
    plan: Plan

    def __call__(
        self, on: Arithmetic, its: Any, state: State, kl: Number, n_steps: Number
    ) -> State:
        target = its.target * self.curve(on, its, state["step"])
        retargeted = _Retargeted(its._inner, target)
        new = advance(on, self.plan, retargeted, state, kl, n_steps)
        return {**new, "step": state["step"] + 1}


def linear(on: Arithmetic, its: Any, step: Number) -> Number:
    """A line from ``start`` to 1 in ``warmup`` steps, then one to ``final`` in ``steps``."""
    return _warmed(on, its, step, _progress(on, its, step))


def cosine(on: Arithmetic, its: Any, step: Number) -> Number:
    """A line from ``start`` to 1 in ``warmup`` steps, then half a cosine to ``final``."""
    return _warmed(on, its, step, 1 - _half_cosine(on, _progress(on, its, step)))


def _progress(on: Arithmetic, its: Any, step: Number) -> Number:
    """The part of ``steps`` that is over, between 0 and 1."""
    return on.minimum(on.maximum(step - its.warmup, 0.0) / its.steps, 1.0)


def _warmed(on: Arithmetic, its: Any, step: Number, done: Number) -> Number:
    warm = its.start + (1 - its.start) * (step / on.maximum(its.warmup, 1.0))
    return on.where(step < its.warmup, warm, 1 + (its.final - 1) * done)


_SINE = tuple(1 / ((2 * n) * (2 * n + 1)) for n in range(8, 0, -1))


def _half_cosine(on: Arithmetic, t: Number) -> Number:
    """(1 + cos(pi t)) / 2 for t in [0, 1], by the series of the sine up to pi / 4."""
    is_late = t > 0.5
    angle = on.where(is_late, 1 - t, t) * (math.pi / 2)
    square = angle * angle
    series = 1 - square * _SINE[0]
    for term in _SINE[1:]:
        series = 1 - square * term * series
    sine = angle * series
    return on.where(is_late, sine * sine, 1 - sine * sine)
