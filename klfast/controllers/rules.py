"""Update rules: pure functions from a measured KL to the next coefficient.

A rule is ``rule(settings, state, batch) -> state``:

- ``settings``: the controller, whose numbers are attributes;
- ``state``: the coefficient under ``"value"``, and what else the rule remembers, numbers by name;
- ``batch``: the measured KL, the target and the number of sequences.

Numbers are Python floats. They may be tensors too, so that ``python -m lab study`` simulates many
runs at once. So a rule is written with ``+ - * /``, comparisons, ``&``, ``|`` and the functions
below.

The error of a rule is relative, ``e = clip(kl / target - 1, -clip, clip)``: gains then mean the
same per sequence and per token, and one wild batch cannot throw the coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = Any  # a Python float, or a tensor of many runs
State: TypeAlias = dict[str, Number]


class MeasuredBatch(NamedTuple):
    """The inputs of a rule for one batch."""

    kl: Number  # measured, in nats, finite
    target: Number  # the KL to hold, None for a rule without
    n_steps: Number  # of sequences


def where(condition: Any, yes: Number, no: Number) -> Number:
    """``yes`` where the condition holds, else ``no``; of tensors one is a tensor."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def minimum(a: Number, b: Number) -> Number:
    """``b`` if ``b < a``, else ``a``."""
    return where(b < a, b, a)


def maximum(a: Number, b: Number) -> Number:
    """``b`` if ``b > a``, else ``a``."""
    return where(b > a, b, a)


def exp(x: Number) -> Number:
    """The exponential; inf where it is beyond the dtype."""
    if isinstance(x, Tensor):
        return x.exp()
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def cos(x: Number) -> Number:
    """The cosine."""
    return x.cos() if isinstance(x, Tensor) else math.cos(x)


def advance(controller: Any, settings: Any, state: State, batch: MeasuredBatch) -> State:
    """The state after a batch of a finite KL, by a controller's rule and the options around it.

    ``settings`` has the numbers. It is the controller, or has tensors of many runs.
    """
    if controller.ema:
        average = settings.ema * state["kl_ema"] + (1 - settings.ema) * batch.kl
        # An average that began at 0 would look far below the target for many updates.
        average = where(state["measured"] == 0, batch.kl, average)
        state = {**state, "kl_ema": average, "measured": state["measured"] + 1}
        batch = MeasuredBatch(average, batch.target, batch.n_steps)
    acting, limit = state, controller._limit
    if controller.floor is not None:
        # A rule that multiplies never leaves 0, so it sees the floor in its place. The limit
        # decides whether the result is 0 again.
        acting = {**state, "value": maximum(state["value"], settings.floor)}
        limit = bounded_or_zero
    new = controller._rule(settings, acting, batch)
    new = {**new, "value": limit(settings, state["value"], new["value"])}
    if controller.dead_band:
        # The memory rests too. An integral would go on moving, and the coefficient would jump
        # later.
        at_rest = abs(batch.kl / batch.target - 1) <= settings.dead_band
        new = {name: where(at_rest, state[name], new[name]) for name in new}
    return new


# Limits


def bounded(settings: Any, old: Number, new: Number) -> Number:
    """``new`` within ``[lowest, highest]``; ``old`` for NaN, which inf - inf gives."""
    number = where(new == new, new, old)  # only NaN differs from itself
    return minimum(maximum(number, settings.lowest), settings.highest)


def bounded_or_zero(settings: Any, old: Number, new: Number) -> Number:
    """0 or within ``[floor, max_coef]``: what would fall below the floor is 0."""
    number = minimum(where(new == new, new, old), settings.highest)
    # A coefficient of 0, which acted as the floor, stays 0 unless the rule raised it above.
    is_off = (number < settings.floor) | ((old == 0) & (number <= settings.floor))
    return where(is_off, 0.0, number)


def bounded_or_absorbed(settings: Any, old: Number, new: Number) -> Number:
    """``bounded``, but 0 stays 0."""
    return where(old == 0, 0.0, bounded(settings, old, new))


# Rules of their sources, see the controllers


def fixed(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """The coefficient stays."""
    return state


def adaptive(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """``value *= 1 + e * n_steps / horizon``."""
    factor = 1 + _error(settings, batch) * batch.n_steps / settings.horizon
    return {**state, "value": state["value"] * factor}


def exponential(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """``value *= exp(gain * (kl - target))``."""
    return {**state, "value": state["value"] * exp(settings.gain * (batch.kl - batch.target))}


def dual(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """``value *= exp(lr * e)``."""
    return {**state, "value": state["value"] * exp(settings.lr * _error(settings, batch))}


def doubling(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """In every ``every``-th batch ``value *= factor`` above the band, ``/= factor`` below it."""
    value, waited = state["value"], state["waited"] + 1
    # The policy follows a coefficient over several updates. Acting on each would overshoot.
    acts = waited >= settings.every
    is_high = batch.kl > settings.threshold * batch.target
    is_low = batch.kl < batch.target / settings.threshold
    moved = where(is_high, value * settings.factor, where(is_low, value / settings.factor, value))
    return {**state, "value": where(acts, moved, value), "waited": where(acts, 0.0, waited)}


def nupi(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """``value += ki * e + kp * (xi - xi_before)``."""
    error = _error(settings, batch)
    # There is no earlier error yet, and one of 0 would make the first step a jump by kp.
    before = where(state["errors"] == 0, error, state["xi"])
    xi = before + (1 - settings.nu) * (error - before)
    value = state["value"] + (settings.ki * error + settings.kp * (xi - before))
    return {**state, "value": value, "xi": xi, "errors": state["errors"] + 1}


def nupi_of_log(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """``log(value) += ki * e + kp * (xi - xi_before)``."""
    # From 0 the new value is the step itself.
    new = nupi(settings, {**state, "value": 0.0}, batch)
    return {**new, "value": state["value"] * exp(new["value"])}


def pid(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """``value = kp * P + I + kd * max(0, D)``; the delayed costs are a shift register."""
    error = _error(settings, batch)
    # within what the coefficient may be, so that it does not wind up
    integral = minimum(maximum(state["integral"] + settings.ki * error, 0.0), settings.highest)
    smoothed_error = settings.p_ema * state["error_ema"] + (1 - settings.p_ema) * error
    cost = settings.d_ema * state["cost_ema"] + (1 - settings.d_ema) * (error + 1)
    # The register holds J of the last updates, so that D compares J with an old one.
    delayed = [name for name in state if name.startswith("cost_ago_")]  # the latest first
    rise = maximum(cost - state[delayed[-1]], 0.0)
    ages = dict(zip(delayed, (cost, *(state[name] for name in delayed)), strict=False))
    return {
        **state,
        **ages,
        "integral": integral,
        "error_ema": smoothed_error,
        "cost_ema": cost,
        "value": settings.kp * smoothed_error + integral + settings.kd * rise,
    }


def control_vae(settings: Any, state: State, batch: MeasuredBatch) -> State:
    """``value = kp / (1 + exp(-e)) + I``; I rests while it would drive a bound further."""
    error, value = _error(settings, batch), state["value"]
    # An integral that grew at a bound would hold the coefficient there long after the KL is back.
    is_stuck = ((value >= settings.highest) & (error > 0)) | (
        (value <= settings.lowest) & (error < 0)
    )
    moved = state["integral"] + settings.ki * error
    integral = where(is_stuck, state["integral"], moved)
    return {**state, "integral": integral, "value": settings.kp / (1 + exp(-error)) + integral}


def _error(settings: Any, batch: MeasuredBatch) -> Number:
    # One wild batch cannot throw the coefficient.
    return minimum(maximum(batch.kl / batch.target - 1, -settings.clip), settings.clip)


# Schedules

Curve: TypeAlias = Callable[[Any, Number], Number]
"""(settings, step) -> what a schedule multiplies by."""


def scheduled(curve: Curve, settings: Any, state: State, batch: MeasuredBatch) -> State:
    """``value = init_kl_coef * curve(step)``."""
    step = state["step"] + 1
    return {**state, "step": step, "value": settings.init_kl_coef * curve(settings, step)}


def scheduled_target(curve: Curve, settings: Any, state: State, batch: MeasuredBatch) -> State:
    """The rule of another controller, with ``target * curve(step)`` for its target."""
    inner, target = settings._inner, batch.target * curve(settings, state["step"])
    new = advance(inner, inner, state, MeasuredBatch(batch.kl, target, batch.n_steps))
    return {**new, "step": state["step"] + 1}


def linear(settings: Any, step: Number) -> Number:
    """A line from ``start`` to 1 in ``warmup`` steps, then one to ``final`` in ``steps``."""
    return _warmed(settings, step, _progress(settings, step))


def cosine(settings: Any, step: Number) -> Number:
    """A line from ``start`` to 1 in ``warmup`` steps, then half a cosine to ``final``."""
    return _warmed(settings, step, (1 - cos(math.pi * _progress(settings, step))) / 2)


def _progress(settings: Any, step: Number) -> Number:
    return minimum(maximum(step - settings.warmup, 0.0) / settings.steps, 1.0)


def _warmed(settings: Any, step: Number, done: Number) -> Number:
    # Without a warm-up its line is not used, and its slope must not divide by 0.
    warm = settings.start + (1 - settings.start) * (step / maximum(settings.warmup, 1.0))
    # At the end a small final would be lost beside 1, and a target of 0 divides by 0.
    after = where(done >= 1, settings.final, 1 + (settings.final - 1) * done)
    return where(step < settings.warmup, warm, after)
