"""Warnings of controllers: a wrong unit, a coefficient at its bound, a slow pace, and no others."""

import copy
import pickle
import random

import pytest
import torch
from kinds import READERS, STEERING, make, stats_of, warned

import klfast
from klfast import AdaptiveKLController, GroupedKLController
from klfast.controllers import CONTROLLERS

constant_target = pytest.mark.parametrize("kind", [k for k in STEERING if k != "scheduled"])
OTHER = {"sequence": "token", "token": "sequence"}


def stats(per_sequence, tokens=100, sequences=4):
    """A batch of this mean KL per sequence, and of this many tokens in each."""
    return stats_of([float(per_sequence)] * sequences, [float(tokens)] * sequences)


def said_by(update, *currents):
    """The warnings that a series of updates gives."""
    _, caught = warned(lambda: [update(current) for current in currents])
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def updating(controller, n_steps=64):
    """``update`` with a count, which every controller accepts."""
    return lambda current: controller.update(current, n_steps)


def reading(kind, target, unit):
    """The ``update`` of a controller or watcher with a target."""
    options = {"monitor": {"window": 1, "low": 0, "high": 1e9}}.get(kind, {})
    target /= 1.5 if kind == "scheduled" else 1.0  # its curve begins there
    reader = READERS[kind](target=target, unit=unit, **options)
    return reader.step if kind == "learning-rate" else reader.update


every_reader = pytest.mark.parametrize(
    "kind", [*STEERING, "monitor", "early-stop", "learning-rate"]
)


@every_reader
@pytest.mark.parametrize(
    ("target", "unit", "numbers"),
    [
        (0.1, "sequence", ("6 nats per sequence", "target of 0.1", "0.06 nats per token")),
        (6.0, "token", ("0.06 nats per token", "target of 6", "6 nats per sequence")),
    ],
)
def test_a_target_in_the_other_unit_is_asked_about_once(kind, target, unit, numbers):
    first, *more = said_by(reading(kind, target, unit), *[stats(6.0)] * 5)
    assert first.endswith(f"did you mean unit='{OTHER[unit]}'?")
    assert all(number in first for number in numbers)
    assert more == []


@every_reader
def test_what_is_merely_off_is_not_asked_about(kind):
    for target, unit, per_sequence, tokens in (
        (0.1, "sequence", 2.0, 100),  # exactly 20 times off
        (0.1, "sequence", 60.0, 100),  # in the other unit it is 6 times off
        (0.1, "sequence", 6.0, 1000),  # in the other unit it is 17 times too low
        (6.0, "token", 31.0, 100),
        (6.0, "sequence", 6.0, 100),
        (0.1, "token", 10.0, 100),
        (0.1, "token", 0.1, 100),  # low per token, as every run begins
        (6.0, "sequence", 0.0, 100),
        (6.0, "sequence", 1e-3, 100),
    ):
        assert said_by(reading(kind, target, unit), stats(per_sequence, tokens)) == []
    update = reading(kind, 0.1, "sequence")
    assert said_by(lambda kl: update(kl, 64), 6.0, torch.tensor(6.0)) == []  # has one unit


def test_every_group_is_asked_about_by_name():
    grouped = GroupedKLController(klfast.DualKLController, 0.1, {"chat": 0.1, "maths": 6.0})
    (said,) = said_by(grouped.update, *[{"chat": stats(6.0), "maths": stats(6.0)}] * 3)
    assert said.startswith("DualKLController of 'chat': the KL is 6 nats per sequence")
    grouped = GroupedKLController(AdaptiveKLController, 0.1, {"a": 6.0})
    (said,) = said_by(lambda kl: grouped.update({"a": kl}, 8), *[60.0] * 100)
    assert said.startswith("AdaptiveKLController of 'a': in 100 updates")


@constant_target
@pytest.mark.parametrize(
    ("kl", "bound", "remedy"),
    [
        (60.0, {"max_coef": 0.6}, "raise max_coef, or lower the learning rate"),
        (0.6, {"min_coef": 0.4}, "without a penalty too"),
    ],
    ids=["upper", "lower"],
)
def test_a_coefficient_at_its_bound_is_named_once(kind, kl, bound, remedy):
    controller = make(kind, 0.5, 6.0, **bound)
    (first,) = said_by(updating(controller, 6400), *[kl] * 300)
    ((name, value),) = bound.items()
    assert controller.value == value
    assert f"the coefficient is at its bound {name}={value}" in first
    assert f"{kl:.3g} nats per {controller.unit}, target 6" in first
    assert remedy in first


SLOW = {
    "adaptive": {"horizon": 1e5},
    "nupi": {"ki": 1e-4},
    "dual": {"lr": 1e-4},
    "exponential": {"gain": 1e-6},
    "pid-lagrangian": {"ki": 1e-6, "kp": 0.0, "kd": 0.0},
    "control-vae": {"ki": 1e-6, "kp": 1e-3},
    "scheduled": {"ki": 1e-4, "start": 1.0, "final": 1.0},
    "doubling": {"factor": 1.001},
}


def test_every_rule_has_a_setting_that_makes_it_slow():
    assert SLOW.keys() == CONTROLLERS.keys()


@pytest.mark.parametrize("kind", SLOW)
def test_the_setting_that_makes_a_rule_slow_is_named_once_after_100_updates(kind):
    controller = make(kind, 0.5, 6.0, **SLOW[kind])
    assert said_by(updating(controller), *[20.0] * 99) == []
    (first,) = said_by(updating(controller), *[20.0] * 500)
    assert "in 100 updates the coefficient went from 0.5" in first
    name, value = next(iter(SLOW[kind].items()))
    pace = f"its pace is set by {name}={value!r}: raise it"
    if kind == "adaptive":
        pace = "clip * n_steps / horizon = 0.2 * 64 / 1e+05 of itself a step: choose a horizon"
    assert pace in first


def test_a_coefficient_that_the_kl_does_not_follow_is_named():
    controller = klfast.DualKLController(0.1, 6.0, lr=0.1, max_coef=1e9)
    (first,) = said_by(controller.update, *[12.0] * 300)
    assert "the KL does not follow it yet: check that it is in the loss" in first
    controller = klfast.DualKLController(0.5, 0.1, unit="token")
    assert said_by(controller.update, *[stats(0.1)] * 99) == []
    (first,) = said_by(controller.update, *[stats(0.1)] * 300)  # low all the time
    assert first.endswith("did you mean unit='sequence'?")


@pytest.mark.parametrize("target", [6.0, 0.1])
@pytest.mark.parametrize("kind", [kind for kind in STEERING if kind != "pid-lagrangian"])
def test_nothing_is_said_where_the_target_is_held(kind, target):
    """The KL climbs from 0 to the target.

    It follows 3 * target / (1 + coefficient), slowly and noisily. PID's default gains are for
    smaller coefficients than this loop needs.
    """
    controller, rng, kl = make(kind, 1.0, target), random.Random(0), 0.0
    for _ in range(2_000):  # a warning would be an error
        kl += 0.1 * (3 * target / (1 + controller.value) - kl)
        controller.update(kl * rng.uniform(0.9, 1.1), 640)


@pytest.mark.parametrize(
    ("controller", "kls"),
    [
        (AdaptiveKLController(0.1, 6.0), [6.0 + 54 * 0.995**step for step in range(700)]),
        (AdaptiveKLController(0.1, 6.0), [7.1] * 500),  # within a fifth of the target
        (AdaptiveKLController(0.1, 6.0), [*[12.0] * 99, 6.0] * 5),
        (AdaptiveKLController(0.1, 6.0, dead_band=1.5), [12.0] * 300),
        (klfast.DualKLController(0.1, 6.0, floor=0.01), [0.5] * 500),  # it may rest at 0
        (klfast.FixedKLController(0.1), [*[1e6] * 300, stats(6.0)]),
    ],
    ids=["nearer", "near", "on-target-between", "band", "floor", "fixed"],
)
def test_what_is_no_stall(controller, kls):
    assert said_by(updating(controller, 8), *kls) == []


@pytest.mark.parametrize(
    "carry_over",
    [copy.copy, copy.deepcopy, lambda controller: pickle.loads(pickle.dumps(controller))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_goes_on_counting_by_itself(carry_over):
    controller = AdaptiveKLController(0.1, 6.0)
    assert said_by(updating(controller, 8), *[60.0] * 60) == []
    other = carry_over(controller)
    assert said_by(updating(controller, 8), *[60.0] * 39) == []
    assert len(said_by(updating(other, 8), *[60.0] * 40)) == 1
    assert len(said_by(updating(controller, 8), 60.0)) == 1
    scheduled = klfast.ScheduledKLController(0.1, 6.0)
    carry_over(scheduled).load_state_dict({**scheduled.state_dict(), "value": 500.0})
    assert scheduled.max_coef == scheduled._inner.max_coef < 500
    resumed = AdaptiveKLController(0.1, 6.0)
    said_by(updating(resumed, 8), *[60.0] * 60)
    resumed.load_state_dict(resumed.state_dict())  # the count begins anew
    assert said_by(updating(resumed, 8), *[60.0] * 99) == []
    assert len(said_by(updating(resumed, 8), 60.0)) == 1
