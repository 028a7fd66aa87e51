"""klfast.compat's controllers: the frameworks' names and call forms, the published rule."""

import inspect
import json
import math
from types import SimpleNamespace
from typing import NamedTuple

import frameworks
import pytest
import torch

import klfast
from klfast.compat import openrlhf, roll, trl, trlx, verl
from klfast.stats import KLStats


class Names(NamedTuple):
    """What one framework calls the arguments, and what it measures a KL by."""

    module: object
    constructor: tuple
    update: tuple
    unit: str


FRAMEWORKS = {
    "openrlhf": Names(
        openrlhf, ("init_kl_coef", "target", "horizon"), ("current", "n_steps"), "sequence"
    ),
    "roll": Names(roll, ("init_kl_coef", "target", "horizon"), ("current", "n_steps"), "token"),
    "trl": Names(trl, ("init_kl_coef", "target", "horizon"), ("current", "n_steps"), "sequence"),
    "trlx": Names(trlx, ("init_kl_coef", "target", "horizon"), ("current", "n_steps"), "sequence"),
    "verl": Names(
        verl, ("init_kl_coef", "target_kl", "horizon"), ("current_kl", "n_steps"), "token"
    ),
}
every_framework = pytest.mark.parametrize("names", FRAMEWORKS.values(), ids=FRAMEWORKS)


def stats(kl, length):
    """Statistics of a batch; what controllers do not read is NaN."""
    kl, length = torch.tensor(kl), torch.tensor(length)
    return KLStats(kl, length, *[torch.full_like(kl, math.nan)] * 6)


def adaptive(names, target=0.1, **options):
    return names.module.AdaptiveKLController(0.2, target, 1_000, **options)


# Names


@every_framework
def test_arguments_have_the_frameworks_names_in_its_order(names):
    for function, expected in (
        (names.module.AdaptiveKLController, names.constructor),
        (names.module.AdaptiveKLController.update, ("self", *names.update)),
        (names.module.FixedKLController, ("kl_coef",)),
        (names.module.FixedKLController.update, ("self", *names.update)),
    ):
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == [*expected]


@every_framework
def test_by_position_and_by_keyword(names):
    values = {}
    for by_keyword in (False, True):

        def call(function, argument_names, *numbers, by_keyword=by_keyword):
            keywords = dict(zip(argument_names, numbers, strict=True))
            return function(**keywords) if by_keyword else function(*numbers)

        controller = call(names.module.AdaptiveKLController, names.constructor, 0.2, 6.0, 1_000)
        fixed = call(names.module.FixedKLController, ("kl_coef",), 0.3)
        for kl in (9.0, 5.9, 0.0):
            returned = call(controller.update, names.update, kl, 64)
            assert returned == controller.value
            assert call(fixed.update, names.update, kl, 64) == fixed.value == 0.3
        values[by_keyword] = controller.value
    assert values[True] == values[False] != 0.2


@every_framework
def test_they_are_klfasts_own(names):
    assert isinstance(adaptive(names), klfast.AdaptiveKLController)
    assert isinstance(names.module.FixedKLController(0.1), klfast.FixedKLController)
    assert adaptive(names, clip=0.5, max_coef=3.0).max_coef == 3.0


# The rule


@every_framework
@pytest.mark.parametrize("target", [6.0, 0.1])
def test_the_trajectory_is_the_published_rule_bit_for_bit(names, target):
    controller, expected = adaptive(names, target), 0.2
    kls = (target * (1 + 0.3 * torch.randn(500, dtype=torch.float64))).tolist()
    for step, kl in enumerate([*kls, 0.0, -1.0, 1e6, target]):
        n_steps = 1 + 7 * step % 256
        controller.update(kl, n_steps)
        expected = frameworks.controller_step(expected, kl, target, n_steps, 1_000)
        assert controller.value == expected


@every_framework
@pytest.mark.parametrize("kl", [3.0, torch.tensor(3.0), torch.tensor([3.0])[0]], ids=str)
def test_the_value_stays_a_python_float(names, kl):
    controller = adaptive(names)
    controller.update(kl, 10)
    assert type(controller.value) is float
    assert controller.value == frameworks.controller_step(0.2, 3.0, 0.1, 10, 1_000)


@every_framework
def test_what_poisons_the_frameworks_own_does_not_stay(names):
    controller = adaptive(names)
    with pytest.warns(RuntimeWarning, match="skipped a KL of nan"):
        controller.update(math.nan, 10)
    assert (controller.value, controller.skipped) == (0.2, 1)
    controller.update(0.0, 1_000_000)  # theirs: 0.2 * (1 - 200), negative
    assert controller.value == 1e-6
    with pytest.raises(ValueError, match="target"):
        adaptive(names, target=0)


@every_framework
def test_statistics_are_read_in_the_frameworks_unit(names):
    batch = stats([6.0, 0.0, 3.0], [4.0, 0.0, 14.0])
    kl = {"token": 9 / 18, "sequence": 9 / 2}[names.unit]
    controller = adaptive(names, target=1.0)
    assert controller.unit == names.unit
    expected = frameworks.controller_step(0.2, kl, 1.0, 3, 1_000)
    assert controller.update(batch) == expected
    assert names.module.FixedKLController(0.3).update(batch) == 0.3


# Factories


CONFIG = {"kl_coef": 0.3, "target_kl": 0.2, "horizon": 500}


def test_verls_factory():
    fixed = verl.get_kl_controller(SimpleNamespace(type="fixed", **CONFIG))
    assert type(fixed) is verl.FixedKLController
    assert fixed.value == 0.3
    adaptive = verl.get_kl_controller(SimpleNamespace(type="adaptive", **CONFIG))
    assert type(adaptive) is verl.AdaptiveKLController
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.3, 0.2, 500)
    assert adaptive.unit == "token"


def test_verls_factory_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"kl_ctrl.type 'linear'; expected one of 'fixed', 'adapt"):
        verl.get_kl_controller(SimpleNamespace(type="linear", **CONFIG))
    with pytest.raises(ValueError, match="horizon must be a finite number > 0"):
        verl.get_kl_controller(SimpleNamespace(type="adaptive", **{**CONFIG, "horizon": 0}))


def test_rolls_factory():
    for nothing in ({}, {"target_kl": None}, {"target_kl": None, "kl_horizon": 500}):
        fixed = roll.get_kl_controller(init_kl_coef=0.3, **nothing)
        assert type(fixed) is roll.FixedKLController
        assert fixed.value == 0.3
    for horizon, expected in ((None, 10_000), (500, 500)):
        adaptive = roll.get_kl_controller(init_kl_coef=0.3, target_kl=0.2, kl_horizon=horizon)
        assert type(adaptive) is roll.AdaptiveKLController
        assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.3, 0.2, expected)
        assert adaptive.unit == "token"
    assert roll.get_kl_controller(0.3, 0.2, 500).horizon == 500


def test_trlxs_factory():
    fixed = trlx.get_kl_controller(0.3)
    assert type(fixed) is trlx.FixedKLController
    assert fixed.value == 0.3
    adaptive = trlx.get_kl_controller(0.3, target=6, horizon=500)
    assert type(adaptive) is trlx.AdaptiveKLController
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.3, 6, 500)
    assert adaptive.unit == "sequence"


# Checkpoints


@every_framework
def test_checkpoints_go_from_klfasts_own_and_back(names):
    own, compat = klfast.AdaptiveKLController(0.2, 0.1, 1_000), adaptive(names)
    for controller, resumed in ((compat, own), (own, compat)):
        controller.update(0.15, 33)
        resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
        assert resumed.value == controller.value != 0.2
        assert resumed.state_dict() == controller.state_dict()

    fixed, other = names.module.FixedKLController(0.3), klfast.FixedKLController(0.5)
    other.load_state_dict(fixed.state_dict())
    assert other.value == 0.3
    with pytest.raises(ValueError, match="kind"):
        compat.load_state_dict(fixed.state_dict())
