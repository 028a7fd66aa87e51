"""The options of every controller with a target: dead band, moving average, floor, groups."""

import json
import math
import warnings

import pytest
import torch
from kinds import STEERING, make

import klfast
from klfast import (
    AdaptiveKLController,
    FixedKLController,
    GroupedKLController,
    KLStats,
    TargetController,
)

every_kind = pytest.mark.parametrize("kind", STEERING)
constant_target = pytest.mark.parametrize("kind", [k for k in STEERING if k != "scheduled"])
MULTIPLYING = ["adaptive", "exponential", "nupi", "dual", "doubling"]


def test_every_public_controller_with_a_target_is_tested():
    steering = (TargetController, klfast.ScheduledKLController)
    public = {getattr(klfast, name) for name in klfast.__all__} - {TargetController}
    expected = {c for c in public if isinstance(c, type) and issubclass(c, steering)}
    assert {cls for cls, _ in STEERING.values()} == expected


# Dead band


@constant_target
def test_nothing_moves_within_the_dead_band(kind):
    controller = make(kind, 0.5, 6.0, dead_band=0.25)
    before = controller.state_dict()
    for kl in (6.0, 7.5, 4.5, 7.0):
        assert controller.update(kl, 64) == 0.5
    assert controller.state_dict() == before


@constant_target
def test_outside_the_dead_band_the_rule_is_as_without(kind):
    with_band, without = make(kind, 0.5, 6.0, dead_band=0.25), make(kind, 0.5, 6.0)
    for kl in (7.6, 4.4, 30.0, -1.0):
        assert with_band.update(kl, 64) == without.update(kl, 64)


# Moving average


@every_kind
def test_the_rule_sees_the_average(kind):
    averaged, plain, average = make(kind, 0.5, 6.0, ema=0.75), make(kind, 0.5, 6.0), None
    for kl in (8.0, 2.0, 40.0, 6.5, 6.0):
        average = kl if average is None else 0.75 * average + 0.25 * kl
        assert averaged.update(kl, 64) == plain.update(average, 64)


@every_kind
def test_a_bad_kl_does_not_reach_the_average(kind):
    averaged, clean = make(kind, 0.5, 6.0, ema=0.75), make(kind, 0.5, 6.0, ema=0.75)
    with pytest.warns(RuntimeWarning, match="skipped"):
        averaged.update(math.nan, 64)
    for kl in (8.0, 2.0):
        assert averaged.update(kl, 64) == clean.update(kl, 64)


# Floor


@pytest.mark.filterwarnings("ignore:.*in 100 updates:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*for 100 updates:RuntimeWarning")
@every_kind
def test_a_floor_lets_the_coefficient_leave_0(kind):
    controller = make(kind, 0.0, 6.0, floor=0.01)
    assert controller.value == 0.0
    for _ in range(100):
        controller.update(1.0, 64)
    assert controller.value == 0.0  # below the target nothing asks for a penalty
    for _ in range(100):
        controller.update(20.0, 640)
    assert controller.value > 0.01


@every_kind
@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
def test_0_is_left_soon_however_long_the_kl_was_low(kind, device):
    controller = make(kind, 0.1, 6.0, floor=0.01, device=device)
    for _ in range(1000):
        controller.update(0.5, 640)
    assert controller.value == 0.0
    updates = 0
    while controller.value == 0.0:
        controller.update(18.0, 640)
        updates += 1
        assert updates <= 15


@pytest.mark.parametrize("kind", MULTIPLYING)
def test_the_first_step_from_0_is_that_from_the_floor(kind):
    from_zero, from_floor = make(kind, 0.0, 6.0, floor=0.01), make(kind, 0.01, 6.0, min_coef=0.01)
    for _ in range(12):
        assert from_zero.update(20.0, 64) in (from_floor.update(20.0, 64), 0.0)
    assert from_zero.value == from_floor.value > 0.01


@pytest.mark.parametrize("kind", MULTIPLYING)
def test_below_the_floor_the_coefficient_is_0(kind):
    controller = make(kind, 0.02, 6.0, floor=0.01)
    values = [controller.update(0.5, 640) for _ in range(500)]
    assert values[-1] == 0.0
    assert all(value == 0.0 or value >= 0.01 for value in values)


@every_kind
def test_without_a_floor_0_is_an_error(kind):
    with pytest.raises(ValueError, match="init_kl_coef must be"):
        make(kind, 0.0, 6.0)
    with pytest.raises(ValueError, match=r"init_kl_coef must be a finite number >= 0\.01"):
        make(kind, 0.005, 6.0, floor=0.01)


def test_a_dead_band_is_around_the_scheduled_target():
    options = {"steps": 1, "final": 2.0, "controller": klfast.DualKLController, "dead_band": 0.1}
    controller = klfast.ScheduledKLController(0.5, 6.0, **options)
    assert controller.update(6.0) == 0.5
    assert controller.update(12.0) == 0.5  # from here on the target is 12
    assert controller.update(6.0) < 0.5


# Bad settings


@every_kind
@pytest.mark.parametrize(
    ("option", "bad", "error"),
    [
        ("dead_band", -0.1, ValueError),
        ("dead_band", math.nan, ValueError),
        ("ema", 1.0, ValueError),
        ("ema", -0.1, ValueError),
        ("ema", "0.5", TypeError),
        ("floor", 0.0, ValueError),
        ("floor", True, TypeError),
        ("device", "gpu", ValueError),
        ("device", 0, TypeError),
        ("process_group", "world", TypeError),
    ],
)
def test_a_bad_option_is_refused(kind, option, bad, error):
    with pytest.raises(error, match=f"{option} must be") as caught:
        make(kind, 0.5, 6.0, **{option: bad})
    assert "\n" not in str(caught.value)


BAD_SETTINGS = [
    ("nupi", {"kp": -1.0}),
    ("nupi", {"ki": 0.0}),
    ("nupi", {"nu": 1.0}),
    ("nupi", {"scale": "log2"}),
    ("nupi", {"clip": 0.0}),
    ("pid-lagrangian", {"kd": -1.0}),
    ("pid-lagrangian", {"ki": math.inf}),
    ("pid-lagrangian", {"d_delay": 0}),
    ("pid-lagrangian", {"p_ema": 1.0}),
    ("dual", {"lr": 0.0}),
    ("doubling", {"factor": 1.0}),
    ("doubling", {"threshold": 0.5}),
    ("doubling", {"every": 0}),
    ("control-vae", {"kp": 0.0}),
    ("scheduled", {"shape": "square"}),
    ("scheduled", {"steps": 0}),
    ("scheduled", {"warmup": -1}),
    ("scheduled", {"start": 0.0}),
    ("scheduled", {"final": -1.0}),
]


@pytest.mark.parametrize(("kind", "setting"), BAD_SETTINGS, ids=str)
def test_a_bad_setting_is_refused(kind, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        make(kind, 0.5, 6.0, **setting)


def test_a_schedule_of_the_coefficient_has_no_options_of_a_target():
    with pytest.raises(TypeError, match="target must be a number when kp is given"):
        klfast.ScheduledKLController(0.1, kp=0.1)
    with pytest.raises(TypeError, match="controller must be the class"):
        klfast.ScheduledKLController(0.1, 6.0, controller=FixedKLController)


@pytest.mark.filterwarnings("ignore:.*in 100 updates:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*for 100 updates:RuntimeWarning")
@every_kind
@pytest.mark.parametrize("wild", [1e308, -1e308, 5e-324, 1e17], ids=str)
def test_wild_numbers_leave_a_finite_coefficient_within_its_bounds(kind, wild):
    controller = make(kind, 0.5, 1e-300, ema=0.5)
    for kl in (wild, -wild, 0.0, wild, wild) * 20:
        value = controller.update(kl, 10**300)
        assert type(value) is float
        assert 1e-6 <= value <= controller.highest
    json.dumps(controller.state_dict(), allow_nan=False)


# Groups


def stats(kl, length):
    rest = [torch.zeros(len(kl))] * 6
    return KLStats(torch.tensor(kl), torch.tensor(length), *rest)


@every_kind
def test_each_group_is_steered_by_its_own_kl_and_target(kind):
    cls, options = STEERING[kind]
    targets = {"chat": 6.0, "maths": 20.0}
    grouped = GroupedKLController(cls, {"chat": 0.1, "maths": 0.5}, targets, **options)
    alone = {"chat": make(kind, 0.1, 6.0), "maths": make(kind, 0.5, 20.0)}
    for step in range(20):
        kls = {"chat": 8.0 + step, "maths": 8.0 + step}
        if step % 3 == 0:
            del kls["maths"]
        expected = {name: alone[name].update(kl, 64) for name, kl in kls.items()}
        assert {**grouped.update(kls, 64)}.items() >= expected.items()
    assert grouped.value == {name: part.value for name, part in alone.items()}
    assert grouped.value["chat"] > 0.1
    assert grouped.value["maths"] != 0.5


def test_groups_take_statistics_and_counts_by_group():
    grouped = GroupedKLController(AdaptiveKLController, 0.1, {"a": 6.0, "b": 6.0})
    grouped.update({"a": stats([9.0, 9.0], [3.0, 3.0]), "b": 9.0}, {"a": None, "b": 64})
    assert grouped.value == {
        "a": AdaptiveKLController(0.1, 6.0).update(9.0, 2),
        "b": AdaptiveKLController(0.1, 6.0).update(9.0, 64),
    }


def test_groups_resume_and_a_damaged_state_changes_nothing():
    def fresh():
        return GroupedKLController(klfast.NuPIKLController, 0.1, {"a": 6.0, "b": 1.0}, nu=0.5)

    grouped = fresh()
    grouped.update({"a": 9.0, "b": 0.5})
    state = json.loads(json.dumps(grouped.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert resumed.update({"a": 4.0}) == grouped.update({"a": 4.0})

    unchanged = fresh().state_dict()
    for damage in (
        {"kind": "adaptive"},
        {"version": 2},
        {"groups": {"a": state["groups"]["a"]}},
        {"groups": {**state["groups"], "b": {**state["groups"]["b"], "value": math.nan}}},
        {"groups": None},
        {"junk": 1},
    ):
        resumed = fresh()
        with pytest.raises((ValueError, TypeError), match="state"):
            resumed.load_state_dict({**state, **damage})
        assert resumed.state_dict() == unchanged


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((FixedKLController, 0.1, {"a": 6.0}), TypeError),
        ((AdaptiveKLController, 0.1, 6.0), TypeError),
        ((AdaptiveKLController, 0.1, {}), ValueError),
        ((AdaptiveKLController, 0.1, {"a": -6.0}), ValueError),
        ((AdaptiveKLController, 0.1, {1: 6.0}), TypeError),
        ((AdaptiveKLController, {"b": 0.1}, {"a": 6.0}), ValueError),
    ],
)
def test_bad_groups_are_refused(arguments, error):
    with pytest.raises(error, match="must"):
        GroupedKLController(*arguments)


@pytest.mark.parametrize(("current", "error"), [(6.0, TypeError), ({"c": 6.0}, ValueError)])
def test_an_unknown_group_is_refused(current, error):
    grouped = GroupedKLController(AdaptiveKLController, 0.1, {"a": 6.0})
    with pytest.raises(error, match="current must"):
        grouped.update(current, 8)


@pytest.mark.parametrize(
    ("current", "n_steps"),
    [({"a": 9.0, "b": "9"}, 8), ({"a": 9.0, "b": 9.0}, {"a": 8, "b": -8}), ({"a": 9.0}, None)],
)
@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
def test_a_bad_update_of_one_group_changes_none(current, n_steps, device):
    grouped = GroupedKLController(AdaptiveKLController, 0.1, {"a": 6.0, "b": 6.0}, device=device)
    before = grouped.state_dict()
    with pytest.raises((TypeError, ValueError), match="must be"):
        grouped.update(current, n_steps)
    assert grouped.state_dict() == before


def test_a_group_without_a_kl_is_not_skipped():
    grouped = GroupedKLController(klfast.DualKLController, 0.1, {"a": 6.0, "b": 6.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grouped.update({"a": 9.0})
    assert grouped.skipped == {"a": 0, "b": 0}
    assert grouped.value["b"] == 0.1
