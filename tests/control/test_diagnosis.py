"""What controllers say of a KL that they do not hold: the unit, a bound, the pace. And not more."""

import copy
import math
import pickle
import random
import warnings

import pytest
import torch
from kinds import STEERING, make

import klfast
from klfast import AdaptiveKLController, GroupedKLController, KLAdaptiveLR, KLEarlyStop, KLMonitor

constant_target = pytest.mark.parametrize("kind", [k for k in STEERING if k != "scheduled"])


def stats(per_sequence, tokens=100, sequences=4):
    """A batch of this mean KL per sequence, and of this many tokens in each."""
    kl = torch.full((sequences,), float(per_sequence))
    length = torch.full((sequences,), float(tokens))
    return klfast.KLStats(kl, length, *[torch.zeros(sequences)] * 6)


def said_by(update, *currents):
    """The warnings that a series of updates gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for current in currents:
            update(current)
    assert all(each.category is RuntimeWarning for each in caught)
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def updating(controller, n_steps=64):
    """``update`` with a count, which every rule takes."""
    return lambda current: controller.update(current, n_steps)


# The unit


def rate(target, unit):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return KLAdaptiveLR(optimizer, target, unit=unit).step


READERS = {
    **{
        kind: lambda target, unit, kind=kind: make(kind, 0.5, target, unit=unit).update
        for kind in STEERING
    },
    "monitor": lambda target, unit: KLMonitor(target, unit=unit, window=1, low=0, high=1e9).update,
    "early-stop": lambda target, unit: KLEarlyStop(target, unit=unit).update,
    "learning-rate": rate,
}
every_reader = pytest.mark.parametrize("reader", READERS)


@every_reader
@pytest.mark.parametrize(
    ("target", "unit", "per_sequence", "numbers"),
    [
        (0.1, "sequence", 6.0, ("6 nats per sequence", "target of 0.1", "0.06 nats per token")),
        (6.0, "token", 6.0, ("0.06 nats per token", "target of 6", "6 nats per sequence")),
    ],
)
def test_a_target_in_the_other_unit_is_asked_about_once(
    reader, target, unit, per_sequence, numbers
):
    options = {"scheduled": 1.5}  # its curve begins there, see kinds.STEERING
    update = READERS[reader](target / options.get(reader, 1.0), unit)
    first, *more = said_by(update, *[stats(per_sequence)] * 5)
    other = {"sequence": "token", "token": "sequence"}[unit]
    assert first.endswith(f"did you mean unit='{other}'?")
    assert all(number in first for number in numbers)
    assert more == []


@pytest.mark.parametrize(
    ("target", "unit", "per_sequence", "tokens"),
    [
        (0.1, "sequence", 2.0, 100),  # 20 times off, not over
        (0.1, "sequence", 60.0, 100),  # 6 times off in the other unit
        (0.1, "sequence", 6.0, 1000),  # the other one is 17 times too low
        (6.0, "token", 31.0, 100),
        (6.0, "sequence", 6.0, 100),
        (0.1, "token", 10.0, 100),
        (0.1, "token", 0.1, 100),  # low per token, as at the beginning of every run
        (6.0, "sequence", 0.0, 100),
        (6.0, "sequence", 1e-3, 100),
    ],
)
@every_reader
def test_what_is_merely_off_is_not_asked_about(reader, target, unit, per_sequence, tokens):
    if reader == "scheduled":
        target /= 1.5
    assert said_by(READERS[reader](target, unit), stats(per_sequence, tokens)) == []


@every_reader
def test_a_plain_number_has_one_unit(reader):
    update = READERS[reader](0.1, "sequence")
    currents = (6.0, torch.tensor(6.0))
    assert said_by(lambda kl: update(kl, 64), *currents) == []


def test_empty_and_bad_batches_are_not_asked_about():
    controller = AdaptiveKLController(0.1, 0.1)
    empty = stats(0.0, tokens=0)
    nan = stats(math.nan)
    assert len(said_by(controller.update, empty, nan, stats(0.0, sequences=0))) == 1  # skipped
    assert controller.skipped == 3


def test_every_group_is_asked_about_by_name():
    grouped = GroupedKLController(klfast.DualKLController, 0.1, {"chat": 0.1, "maths": 6.0})
    (said,) = said_by(grouped.update, *[{"chat": stats(6.0), "maths": stats(6.0)}] * 3)
    assert said.startswith("DualKLController of 'chat': the KL is 6 nats per sequence")


def test_the_coefficient_has_moved_when_the_warning_is_an_error():
    controller = AdaptiveKLController(0.1, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="did you mean"):
            controller.update(stats(6.0))
        controller.update(stats(6.0))
    expected = AdaptiveKLController(0.1, 0.1)
    expected.update(6.0, 4)
    assert controller.value == expected.update(6.0, 4)


def test_a_device_says_nothing():
    controller = AdaptiveKLController(0.1, 0.1, device="cpu", max_coef=0.2)
    assert said_by(controller.update, *[stats(6.0)] * 300) == []


# A bound, the pace


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
    update = updating(controller, 6400)
    (first,) = said_by(update, *[kl] * 300)
    ((name, value),) = bound.items()
    assert controller.value == value
    assert f"the coefficient is at its bound {name}={value}" in first
    assert f"{kl:.3g} nats per {controller.unit}, target 6" in first
    assert remedy in first


@pytest.mark.parametrize("kl", [60.0, 0.6])
def test_a_slow_horizon_is_named_once_after_100_updates(kl):
    controller = AdaptiveKLController(0.1, 6.0)
    assert said_by(updating(controller, 8), *[kl] * 99) == []
    (first,) = said_by(updating(controller, 8), *[kl] * 500)
    assert "in 100 updates the coefficient went from 0.1 to 0.10" in first or kl < 6
    assert f"{kl:.3g} nats per {controller.unit}, target 6" in first
    assert "at most clip * n_steps / horizon = 0.2 * 8 / 1e+04 of itself a step" in first
    assert "choose a horizon of about n_steps times the number of steps you want" in first


@pytest.mark.parametrize(
    ("controller", "named"),
    [
        (klfast.NuPIKLController(0.1, 6.0, ki=1e-4), "ki=0.0001"),
        (klfast.DualKLController(0.1, 6.0, lr=1e-4), "lr=0.0001"),
        (klfast.ExponentialKLController(0.1, 6.0, gain=1e-6), "gain=1e-06"),
        (klfast.PIDLagrangianKLController(0.1, 6.0, kp=0.0, kd=0.0, ki=1e-6), "ki=1e-06"),
        (klfast.ControlVAEKLController(0.5, 6.0, ki=1e-6, kp=1e-3), "ki=1e-06"),
        (klfast.ScheduledKLController(0.1, 6.0, ki=1e-4), "ki=0.0001"),
        (klfast.DoublingKLController(0.1, 6.0, factor=1.001), "factor=1.001"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_the_setting_that_makes_a_rule_slow_is_named(controller, named):
    (first,) = said_by(updating(controller), *[20.0] * 300)
    assert f"its pace is set by {named}: raise it" in first


def test_a_coefficient_that_the_kl_does_not_follow_is_named():
    controller = klfast.DualKLController(0.1, 6.0, lr=0.1, max_coef=1e9)
    (first,) = said_by(controller.update, *[12.0] * 300)
    assert "the KL does not follow it yet: check that it is in the loss" in first
    assert "from 0.1 to 2.2e+03" in first.replace("2203", "2.2e+03")


def test_a_low_kl_per_token_that_stays_is_asked_about_by_its_unit():
    controller = klfast.DualKLController(0.5, 0.1, unit="token")
    assert said_by(controller.update, *[stats(0.1)] * 99) == []
    (first,) = said_by(controller.update, *[stats(0.1)] * 300)
    assert first.endswith("did you mean unit='sequence'?")


def plant(controller, steps, target=6.0, start=0.0, noise=0.1, strength=1.0):
    """A policy whose KL follows 3 * target / (1 + strength * coefficient), slowly and noisily."""
    rng, kl = random.Random(0), start
    for _ in range(steps):
        kl += 0.1 * (3 * target / (1 + strength * controller.value) - kl)
        yield kl * rng.uniform(1 - noise, 1 + noise)


@pytest.mark.parametrize("target", [6.0, 0.1])
@pytest.mark.parametrize("kind", [kind for kind in STEERING if kind != "pid-lagrangian"])
def test_nothing_is_said_where_the_target_is_held(kind, target):
    """From the first update, at a KL of 0, over the climb to the target.

    PID's default gains are for smaller coefficients than this plant needs: too slow here.
    """
    controller = make(kind, 1.0, target)
    kls = plant(controller, 2_000, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kl in kls:
            controller.update(kl, 640)


def test_a_kl_that_comes_nearer_slowly_is_no_stall():
    controller = AdaptiveKLController(0.1, 6.0)
    assert said_by(updating(controller), *(6.0 + 54 * 0.995**step for step in range(700))) == []


@pytest.mark.parametrize(
    "kls",
    [
        [7.1] * 500,  # within a fifth
        [12.0, 3.0] * 300,
        [*[12.0] * 99, 6.0] * 5,
        [math.nan] * 300,
    ],
    ids=["near", "both-sides", "on-target-between", "nan"],
)
def test_what_is_no_stall(kls):
    controller = AdaptiveKLController(0.1, 6.0)
    said = said_by(updating(controller, 8), *kls)
    assert [text for text in said if "skipped" not in text] == []


def test_the_band_in_which_nothing_moves_is_no_stall():
    controller = AdaptiveKLController(0.1, 6.0, dead_band=1.5)
    assert said_by(updating(controller), *[12.0] * 300) == []
    scheduled = klfast.ScheduledKLController(0.1, 6.0, dead_band=1.5)
    assert said_by(scheduled.update, *[12.0] * 300) == []


def test_a_rule_that_may_rest_at_0_says_nothing_below_its_target():
    controller = klfast.DualKLController(0.1, 6.0, floor=0.01)
    assert said_by(controller.update, *[0.5] * 500) == []
    assert controller.value == 0.0


@pytest.mark.parametrize(
    "make_it",
    [lambda: klfast.FixedKLController(0.1), lambda: klfast.ScheduledKLController(0.1)],
    ids=["fixed", "schedule"],
)
def test_without_a_target_nothing_is_off(make_it):
    assert said_by(make_it().update, *[1e6] * 300, *[stats(6.0)] * 300) == []


@pytest.mark.parametrize("kl", [1e308, -1e308, 0.0, 1e-320])
@pytest.mark.parametrize("target", [1e-300, 5e-324, 6.0, 1e300])
def test_any_numbers_can_be_looked_at(kl, target):
    controller = klfast.DualKLController(0.5, target)
    assert len(said_by(controller.update, *[kl] * 250)) == 1
    assert math.isfinite(controller.value)


# State


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


def test_the_count_begins_anew_with_a_state_and_is_not_part_of_it():
    controller = AdaptiveKLController(0.1, 6.0)
    said_by(updating(controller, 8), *[60.0] * 60)
    state = controller.state_dict()
    assert state.keys() == AdaptiveKLController(0.1, 6.0).state_dict().keys()
    controller.load_state_dict(state)
    assert said_by(updating(controller, 8), *[60.0] * 99) == []
    assert len(said_by(updating(controller, 8), 60.0)) == 1


def test_the_warning_names_the_users_line_through_klfast_itself():
    grouped = GroupedKLController(AdaptiveKLController, 0.1, {"a": 6.0})
    said = said_by(lambda kl: grouped.update({"a": kl}, 8), *[60.0] * 100)
    assert len(said) == 1  # ``said_by`` checks the file
    assert said[0].startswith("AdaptiveKLController of 'a': in 100 updates")
