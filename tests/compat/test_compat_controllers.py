"""Controllers of klfast.compat: the frameworks' argument names, and the published rule."""

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
from kinds import stats_of
from refusals import POSITIVE

import klfast
from klfast.compat import openrlhf, roll, skyrl, trl, trlx, verl
from klfast.controllers import CONTROLLERS


class Names(NamedTuple):
    """A framework's argument names, and its unit of a KL."""

    module: object
    unit: str
    constructor: tuple = ("init_kl_coef", "target", "horizon")
    update: tuple = ("current", "n_steps")


FRAMEWORKS = {
    "openrlhf": Names(openrlhf, "sequence"),
    "roll": Names(roll, "token"),
    "skyrl": Names(skyrl, "token"),
    "trl": Names(trl, "sequence"),
    "trlx": Names(trlx, "sequence"),
    "verl": Names(
        verl, "token", ("init_kl_coef", "target_kl", "horizon"), ("current_kl", "n_steps")
    ),
}
every_framework = pytest.mark.parametrize("names", FRAMEWORKS.values(), ids=FRAMEWORKS)
ABSORBING = "coefficient of 0, which is absorbing"


def adaptive(names, init=0.2, target=0.1, **options):
    return names.module.AdaptiveKLController(init, target, 1_000, **options)


def at_0(names, **options):
    with pytest.warns(RuntimeWarning, match=ABSORBING) as caught:
        controller = adaptive(names, 0.0, **options)
    assert [warning.filename for warning in caught] == [__file__]
    return controller


def silent(function, *arguments, **keywords):
    """The function's result. A warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments, **keywords)


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
    controller = names.module.AdaptiveKLController(
        **dict(zip(names.constructor, (0.2, 0.1, 1_000), strict=True))
    )
    updated = controller.update(**dict(zip(names.update, (9.0, 64), strict=True)))
    assert updated == adaptive(names).update(9.0, 64) == controller.value
    assert isinstance(controller, klfast.AdaptiveKLController)
    fixed = names.module.FixedKLController(kl_coef=0.3)
    assert fixed.update(9.0, 64.0) == fixed.value == 0.3
    assert isinstance(fixed, klfast.FixedKLController)
    assert adaptive(names, clip=0.5, max_coef=3.0).max_coef == 3.0


@every_framework
@pytest.mark.parametrize("init", [0.2, 0.0])
@pytest.mark.filterwarnings("ignore:.*coefficient of 0")
def test_updates_are_the_published_rule_bit_for_bit(names, init):
    controller, expected = adaptive(names, init, 6.0), init
    rng = random.Random(0)
    for step in range(500):
        # KLs lie above the target as often as below, so the coefficient stays within its bounds.
        kl = rng.choice([6 * rng.uniform(0.7, 1.3), 1e6, -1.0, 0.0, 30.0, 6.0])
        n_steps = 1 + 7 * step % 256
        assert controller.update(kl, float(n_steps) if step % 2 else n_steps) == controller.value
        expected = frameworks.controller_step(expected, kl, 6.0, n_steps, 1_000)
        assert controller.value == expected
    assert type(controller.update(torch.tensor(3.0), 10)) is float


@every_framework
def test_statistics_are_read_in_the_frameworks_unit(names):
    batch = stats_of([6.0, 0.0, 3.0], [4.0, 0.0, 14.0])
    kl = {"token": 9 / 18, "sequence": 9 / 2}[names.unit]
    controller = adaptive(names, target=1.0)
    assert controller.unit == names.unit
    other = {"token": "sequence", "sequence": "token"}[names.unit]
    assert names.module.AdaptiveKLController(0.2, 3.0, 1_000, unit=other).unit == other
    assert controller.update(batch) == frameworks.controller_step(0.2, kl, 1.0, 3, 1_000)


# The frameworks accept a coefficient of 0 and n_steps as a float


@every_framework
@pytest.mark.parametrize("bounds", [{}, {"min_coef": 0.05, "max_coef": 0.1}], ids=["", "bounds"])
def test_0_stays_0_and_is_warned_of_once(names, bounds):
    controller = at_0(names, **bounds)
    assert type(controller.value) is float
    batch = stats_of([6.0, 3.0], [4.0, 14.0])
    for arguments in ((1e6, 8), (0.0, 10**9), (-1.0, 8.0), (batch,), (batch, 0)):
        assert silent(controller.update, *arguments) == controller.value == 0
    with pytest.warns(RuntimeWarning, match="skipped a KL of nan"):
        controller.update(math.nan, 8)
    for carry in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        copied = silent(carry, controller)
        assert silent(copied.update, 9.0, 8.0) == 0
        silent(copied.load_state_dict, copied.state_dict())


@every_framework
def test_n_steps_may_be_any_whole_scalar(names):
    expected = frameworks.controller_step(0.2, 3.0, 0.1, 8, 1_000)
    for n_steps in (
        8.0, np.float64(8), np.float32(8), np.int32(8), np.array(8.0), torch.tensor(8),
        torch.tensor(8.0), torch.tensor(8.0, dtype=torch.bfloat16),
    ):  # fmt: skip
        assert adaptive(names).update(3.0, n_steps) == expected != 0.2
        assert names.module.FixedKLController(0.3).update(3.0, n_steps) == 0.3


CONFIG = {"kl_coef": 0.3, "target_kl": 0.2, "horizon": 500}


def of_verl(kind, **changes):
    return verl.get_kl_controller(SimpleNamespace(type=kind, **{**CONFIG, **changes}))


def of_skyrl(kind, **changes):
    kl_ctrl = SimpleNamespace(**{"type": kind, "kl_target": 0.2, "horizon": 500, **changes})
    return skyrl.get_kl_controller(SimpleNamespace(kl_loss_coef=0.3, kl_ctrl=kl_ctrl))


FACTORIES = {
    "verl": (verl, lambda: of_verl("fixed"), lambda: of_verl("adaptive"), 500),
    "skyrl": (skyrl, lambda: of_skyrl("fixed"), lambda: of_skyrl("adaptive"), 500),
    "roll": (
        roll,
        lambda: roll.get_kl_controller(0.3, target_kl=None, kl_horizon=500),
        lambda: roll.get_kl_controller(init_kl_coef=0.3, target_kl=0.2),
        10_000,
    ),
    "trlx": (
        trlx,
        lambda: trlx.get_kl_controller(0.3),
        lambda: trlx.get_kl_controller(0.3, target=0.2, horizon=500),
        500,
    ),
}


@pytest.mark.parametrize(
    ("module", "fixed", "adaptive", "horizon"), FACTORIES.values(), ids=FACTORIES
)
def test_factories(module, fixed, adaptive, horizon):
    assert type(fixed()) is module.FixedKLController
    assert fixed().value == 0.3
    made = adaptive()
    assert type(made) is module.AdaptiveKLController
    assert (made.value, made.target, made.horizon) == (0.3, 0.2, horizon)
    assert made.unit == ("sequence" if module is trlx else "token")


@pytest.mark.parametrize("make", [of_verl, of_skyrl])
def test_a_factory_says_what_is_wrong(make):
    with pytest.raises(ValueError, match=r"kl_ctrl.type 'linear'; expected one of 'fixed', 'adapt"):
        make("linear")
    with pytest.raises(ValueError, match=f"horizon {POSITIVE}"):
        make("adaptive", horizon=0)


@pytest.mark.parametrize("rule", [kind for kind in CONTROLLERS if kind != "adaptive"])
def test_verls_factory_has_every_rule_of_klfast(rule):
    controller, expected = of_verl(rule), CONTROLLERS[rule](0.3, 0.2, unit="token")
    assert isinstance(controller, CONTROLLERS[rule])
    for _ in range(12):
        controller.update(current_kl=0.9, n_steps=64.0)
        expected.update(0.9, 64)
    assert controller.state_dict() == expected.state_dict()
    assert pickle.loads(pickle.dumps(controller)).state_dict() == expected.state_dict()


def test_verls_factory_passes_options_on():
    controller = of_verl("nupi", options={"kp": 0.7, "max_coef": 2.0})
    assert (controller.kp, controller.max_coef, controller.unit) == (0.7, 2.0, "token")
    schedule = of_verl("scheduled", target_kl=None, options={"steps": 2})
    assert schedule.update(current_kl=0.1, n_steps=8) == 0.15
    with pytest.raises(TypeError, match="gain"):
        of_verl("dual", options={"gain": 1.0})
    with pytest.raises(TypeError, match=r"kl_ctrl\.options must be a mapping, got int"):
        of_verl("dual", options=5)


@every_framework
def test_checkpoints_go_from_klfasts_own_and_back(names):
    own = klfast.AdaptiveKLController(0.2, 0.1, 1_000, unit=names.unit)
    compat = adaptive(names)
    for controller, resumed in ((compat, own), (own, compat)):
        controller.update(0.15, 33)
        resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
        assert resumed.value == controller.value != 0.2
        assert resumed.state_dict() == controller.state_dict()
    with pytest.raises(ValueError, match="kind"):
        compat.load_state_dict(names.module.FixedKLController(0.3).state_dict())


@every_framework
def test_a_state_of_0_goes_round(names):
    state = json.loads(json.dumps(at_0(names).state_dict()))
    resumed = at_0(names)
    silent(resumed.load_state_dict, state)  # it has warned already
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
