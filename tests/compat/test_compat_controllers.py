"""klfast.compat's controllers: the frameworks' names and call forms, the published rule."""

import copy
import inspect
import json
import math
import pickle
import random
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import frameworks
import numpy as np
import pytest
import torch
from refusals import POSITIVE

import klfast
from klfast.compat import openrlhf, roll, skyrl, trl, trlx, verl
from klfast.controllers import CONTROLLERS
from klfast.stats.kl import KLStats


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
    "skyrl": Names(skyrl, ("init_kl_coef", "target", "horizon"), ("current", "n_steps"), "token"),
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


@pytest.mark.grid
@every_framework
@pytest.mark.parametrize("wrap", [int, float], ids=["n_steps-int", "n_steps-float"])
@pytest.mark.parametrize("target", [6.0, 0.1])
@pytest.mark.parametrize("init", [0.2, 0, 0.0], ids=repr)
@pytest.mark.filterwarnings("ignore:.*coefficient of 0")
def test_2000_updates_are_the_published_rule_bit_for_bit(names, init, target, wrap):
    controller, expected = names.module.AdaptiveKLController(init, target, 1_000), float(init)
    rng = random.Random(0)
    for step in range(2_000):
        # As often above the target as below, so that the coefficient stays within its bounds.
        kl = rng.choice([target * rng.uniform(0.7, 1.3), 1e6, -1.0, 0.0, 5 * target, target])
        n_steps = 1 + 7 * step % 256
        assert controller.update(kl, wrap(n_steps)) == controller.value
        expected = frameworks.controller_step(expected, kl, target, n_steps, 1_000)
        assert controller.value == expected
    assert (expected == 0) == (init == 0)


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


# What the frameworks' own take, and klfast's does not: a coefficient of 0, n_steps as a float

WHOLE = [
    8.0,
    np.float64(8),
    np.float32(8),
    np.int32(8),
    np.array(8.0),
    torch.tensor(8),
    torch.tensor(8.0),
    torch.tensor(8.0, dtype=torch.bfloat16),
]
ABSORBING = "coefficient of 0, which is absorbing"


def described(number):
    return f"{type(number).__name__}-{getattr(number, 'dtype', number)}"


def silent(function, *arguments, **keywords):
    """The function's result, where a warning would be an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments, **keywords)


def at_0(names, **options):
    with pytest.warns(RuntimeWarning, match=ABSORBING):
        return names.module.AdaptiveKLController(0.0, 0.1, 1_000, **options)


@every_framework
@pytest.mark.parametrize("zero", [0, 0.0, -0.0, np.float64(0)], ids=described)
def test_a_coefficient_of_0_is_taken_and_warned_of_where_the_user_made_it(names, zero):
    with pytest.warns(RuntimeWarning, match=ABSORBING) as caught:
        controller = names.module.AdaptiveKLController(zero, 0.1, 1_000)
    assert [warning.filename for warning in caught] == [__file__]
    assert type(controller.value) is float
    assert repr(controller.value) == "0.0"


@every_framework
@pytest.mark.parametrize("bounds", [{}, {"min_coef": 0.05, "max_coef": 0.1}], ids=["", "bounds"])
def test_0_stays_0_and_is_warned_of_once(names, bounds):
    controller = at_0(names, **bounds)
    batch = stats([6.0, 3.0], [4.0, 14.0])
    for arguments in ((1e6, 8), (0.0, 10**9), (-1.0, 8.0), (batch,), (batch, 0)):
        assert silent(controller.update, *arguments) == controller.value == 0
    with pytest.warns(RuntimeWarning, match="skipped a KL of nan") as caught:
        controller.update(math.nan, 8)
    assert [warning.filename for warning in caught] == [__file__]
    assert (controller.value, controller.skipped) == (0, 1)


@every_framework
@pytest.mark.parametrize(
    ("bad", "error_type"),
    [(-0.1, ValueError), (math.nan, ValueError), (1e-7, ValueError), (False, TypeError)],
    ids=str,
)
def test_0_is_the_only_coefficient_below_the_bounds(names, bad, error_type):
    with pytest.raises(error_type, match="init_kl_coef must be a finite number >="):
        names.module.AdaptiveKLController(bad, 0.1, 1_000)


def test_klfasts_own_keeps_refusing_0():
    with pytest.raises(ValueError, match="init_kl_coef must be"):
        klfast.AdaptiveKLController(0.0, 0.1)
    with pytest.raises(TypeError, match="n_steps must be an integer"):
        klfast.AdaptiveKLController(0.1, 0.1).update(0.1, 8.0)


@every_framework
@pytest.mark.parametrize("n_steps", WHOLE, ids=described)
def test_n_steps_may_be_any_whole_scalar(names, n_steps):
    controller = adaptive(names)
    expected = frameworks.controller_step(0.2, 3.0, 0.1, 8, 1_000)
    assert controller.update(3.0, n_steps) == expected != 0.2
    assert names.module.FixedKLController(0.3).update(3.0, n_steps) == 0.3


@every_framework
@pytest.mark.parametrize(
    ("bad", "error_type"),
    [
        (8.5, TypeError),
        (torch.tensor(8.5), TypeError),
        (np.float32(8.5), TypeError),
        (math.nan, TypeError),
        (math.inf, TypeError),
        (True, TypeError),
        (torch.tensor([8.0]), TypeError),
        ("8", TypeError),
        (-8.0, ValueError),
    ],
    ids=str,
)
def test_n_steps_that_is_no_count_is_one_clear_error(names, bad, error_type):
    for controller in (adaptive(names), names.module.FixedKLController(0.2)):
        with pytest.raises(error_type, match="n_steps must be an integer >= 0") as error:
            controller.update(3.0, bad)
        assert "\n" not in str(error.value)
        assert controller.value == 0.2


# Factories


@pytest.mark.parametrize(
    "make",
    [
        lambda kl_coef: verl.get_kl_controller(
            SimpleNamespace(type="adaptive", kl_coef=kl_coef, target_kl=0.1, horizon=500)
        ),
        lambda kl_coef: roll.get_kl_controller(kl_coef, 0.1, 500),
        lambda kl_coef: trlx.get_kl_controller(kl_coef, 6.0, 500),
    ],
    ids=["verl", "roll", "trlx"],
)
def test_factories_take_a_coefficient_of_0(make):
    with pytest.warns(RuntimeWarning, match=ABSORBING) as caught:
        controller = make(0.0)
    assert [warning.filename for warning in caught] == [__file__]
    assert controller.update(9.0, 8.0) == 0


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
    with pytest.raises(ValueError, match=f"horizon {POSITIVE}"):
        verl.get_kl_controller(SimpleNamespace(type="adaptive", **{**CONFIG, "horizon": 0}))


@pytest.mark.parametrize("rule", [kind for kind in CONTROLLERS if kind != "adaptive"])
def test_verls_factory_has_every_rule_of_klfast(rule):
    controller = verl.get_kl_controller(SimpleNamespace(type=rule, **CONFIG))
    expected = CONTROLLERS[rule](0.3, 0.2, unit="token")
    assert isinstance(controller, CONTROLLERS[rule])
    assert controller.target == 0.2
    for _ in range(12):
        controller.update(current_kl=0.9, n_steps=64.0)
        expected.update(0.9, 64)
    assert controller.value == expected.value
    assert controller.state_dict() == expected.state_dict()
    per_token = stats([3.0, 3.0], [2.0, 3.0])
    assert controller.update(per_token) == expected.update(per_token)


def test_verls_factory_passes_options_on():
    config = SimpleNamespace(type="nupi", **CONFIG, options={"kp": 0.7, "max_coef": 2.0})
    controller = verl.get_kl_controller(config)
    assert (controller.kp, controller.max_coef, controller.unit) == (0.7, 2.0, "token")
    schedule = SimpleNamespace(type="scheduled", kl_coef=0.3, target_kl=None, options={"steps": 2})
    assert verl.get_kl_controller(schedule).update(current_kl=0.1, n_steps=8) == 0.15
    with pytest.raises(TypeError, match="gain"):
        verl.get_kl_controller(SimpleNamespace(type="dual", **CONFIG, options={"gain": 1.0}))
    with pytest.raises(TypeError, match=r"kl_ctrl\.options must be a mapping, got int"):
        verl.get_kl_controller(SimpleNamespace(type="dual", **CONFIG, options=5))


def skyrls_config(kind, **changes):
    kl_ctrl = {"type": kind, "kl_target": 0.2, "horizon": 500, **changes}
    return SimpleNamespace(kl_loss_coef=0.3, kl_ctrl=SimpleNamespace(**kl_ctrl))


def test_skyrls_factory():
    fixed = skyrl.get_kl_controller(skyrls_config("fixed"))
    assert type(fixed) is skyrl.FixedKLController
    assert fixed.value == 0.3
    adaptive = skyrl.get_kl_controller(skyrls_config("adaptive"))
    assert type(adaptive) is skyrl.AdaptiveKLController
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.3, 0.2, 500)
    assert adaptive.unit == "token"
    with pytest.raises(ValueError, match=r"kl_ctrl.type 'linear'; expected one of 'fixed', 'adapt"):
        skyrl.get_kl_controller(skyrls_config("linear"))
    with pytest.raises(ValueError, match=f"horizon {POSITIVE}"):
        skyrl.get_kl_controller(skyrls_config("adaptive", horizon=0))


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
    assert trlx.get_kl_controller(0.3, 6, unit="token", max_coef=2.0).unit == "token"
    with pytest.raises(TypeError, match="unknown option 'gain'"):
        trlx.get_kl_controller(0.3, 6, gain=2.0)
    with pytest.raises(TypeError, match="target must be a number when clip is given"):
        trlx.get_kl_controller(0.3, clip=0.1)


# Checkpoints


@every_framework
def test_checkpoints_go_from_klfasts_own_and_back(names):
    own = klfast.AdaptiveKLController(0.2, 0.1, 1_000, unit=names.unit)
    compat = adaptive(names)
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


@every_framework
def test_a_state_of_0_goes_round(names):
    state = json.loads(json.dumps(at_0(names).state_dict()))
    settings = {"unit": names.unit, "target": 0.1}
    assert state == {"kind": "adaptive", "version": 1, **settings, "skipped": 0, "value": 0.0}

    resumed = at_0(names)
    silent(resumed.load_state_dict, state)  # it has warned already
    assert resumed.state_dict() == state
    assert resumed.update(9.0, 8) == 0

    from_other = adaptive(names)
    with pytest.warns(RuntimeWarning, match=ABSORBING) as caught:
        from_other.load_state_dict(state)
    assert [warning.filename for warning in caught] == [__file__]
    assert from_other.value == from_other.update(9.0, 8) == 0
    silent(from_other.load_state_dict, {**state, "value": 0.5})  # and out of 0 again
    assert from_other.update(9.0, 8) == frameworks.controller_step(0.5, 9.0, 0.1, 8, 1_000)

    with pytest.raises(ValueError, match="value"):
        klfast.AdaptiveKLController(0.2, 0.1, unit=names.unit).load_state_dict(state)


@every_framework
@pytest.mark.parametrize(
    "carry_over",
    [copy.copy, copy.deepcopy, lambda controller: pickle.loads(pickle.dumps(controller))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_at_0_stays_at_0_without_another_warning(names, carry_over):
    copied = silent(carry_over, at_0(names))
    assert silent(copied.update, 9.0, 8.0) == 0
    silent(copied.load_state_dict, copied.state_dict())
