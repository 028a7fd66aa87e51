"""Controllers: the published rules bit for bit, bounds, bad input, units, and checkpoints."""

import copy
import inspect
import json
import math
import pickle
import random
import sys
import warnings
from fractions import Fraction

import kinds
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import POSITIVE
from threads import in_threads

from klfast.controllers import CONTROLLERS
from klfast.controllers.target import (
    ADAPTIVE_OPTIONS,
    AdaptiveKLController,
    ExponentialKLController,
    FixedKLController,
    TargetController,
    TargetOptions,
    get_kl_controller,
)
from klfast.controllers.watchers import KLMonitor
from klfast.stats.kl import KLStats

MAKERS = {
    "fixed": lambda **options: FixedKLController(0.1, **options),
    "adaptive": lambda **options: AdaptiveKLController(0.1, **{"target": 6.0, **options}),
    "exponential": lambda **options: ExponentialKLController(**options),
}
STEERING = ("adaptive", "exponential")
every_kind = pytest.mark.parametrize("kind", MAKERS)
steering_kind = pytest.mark.parametrize("kind", STEERING)

NOT_NUMBERS = [True, "6", None, [6.0], 6j, np.array([6.0]), torch.tensor([6.0]), torch.tensor(True)]
NOT_FINITE = [math.nan, math.inf, -math.inf]

positive_floats = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


def kl_stats(kl: list[float], length: list[float]) -> KLStats:
    """Stats as a kernel would return them; the fields controllers do not read hold rubbish."""
    rubbish = torch.full((len(kl),), math.nan)
    return KLStats(torch.tensor(kl), torch.tensor(length), *[rubbish] * 6)


def published_rule(value, current, n_steps, target, horizon):
    """Ziegler et al. 2019, section 2.2, in the arithmetic of lm-human-preferences."""
    proportional_error = np.clip(np.float64(current) / target - 1, -0.2, 0.2)
    return float(value * (1 + proportional_error * n_steps / horizon))


def assert_one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# The rules


def test_fixed_never_moves():
    controller = FixedKLController(0.3)
    for current in (0, 1e300, -5.0, torch.tensor(7.0), kl_stats([9.0], [2.0])):
        assert controller.update(current) == 0.3
    assert FixedKLController(0).value == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_adaptive_is_the_published_rule_bit_for_bit(seed):
    rng = random.Random(seed)
    target, horizon = rng.choice([(6, 10_000), (0.1, 10_000), (rng.uniform(1e-3, 50), 777)])
    controller = AdaptiveKLController(0.2, target, horizon, min_coef=1e-300, max_coef=math.inf)
    expected = 0.2
    for _ in range(5_000):
        current = target * rng.choice([rng.uniform(0.7, 1.3), rng.lognormvariate(0, 3), -1.0, 1.0])
        n_steps = rng.randrange(1_000)
        expected = published_rule(expected, current, n_steps, target, horizon)
        assert controller.update(current, n_steps) == expected == controller.value
    assert 1e-300 < controller.value < sys.float_info.max  # the bounds never had a part in it


def test_defaults_are_those_of_the_literature():
    adaptive, exponential = AdaptiveKLController(0.1, 6), ExponentialKLController()
    assert (adaptive.horizon, adaptive.clip, adaptive.unit) == (10_000, 0.2, "sequence")
    assert (adaptive.min_coef, adaptive.max_coef) == (1e-6, 100.0)
    assert (exponential.value, exponential.target, exponential.gain) == (0.1, 0.1, 0.1)
    assert (exponential.min_coef, exponential.max_coef, exponential.unit) == (1e-4, 10, "token")


@steering_kind
def test_coefficient_rises_above_target_and_falls_below(kind):
    controller = MAKERS[kind]()
    start, target = controller.value, controller.target
    assert controller.update(target, 64) == start
    assert controller.update(target * 1.1, 64) > start
    assert MAKERS[kind]().update(target * 0.9, 64) < start
    assert MAKERS[kind]().update(-target, 64) < start  # a mean of k1 may be negative


@pytest.mark.filterwarnings("ignore:.*in 100 updates the coefficient went:RuntimeWarning")
@pytest.mark.parametrize("start", [1e-3, 0.1, 5.0])
@pytest.mark.parametrize(
    ("make", "target"),
    [
        (lambda start: AdaptiveKLController(start, 6.0, 2_000, max_coef=math.inf), 6.0),
        (lambda start: ExponentialKLController(start, 0.1), 0.1),
    ],
    ids=STEERING,
)
def test_closed_loop_settles_on_target(make, target, start):
    """A policy whose KL follows, slowly and with noise, 1 / (1 + coefficient)."""
    rng, controller, kl, tail = random.Random(0), make(start), 0.0, []
    for step in range(3_000):
        kl += 0.1 * (3 * target / (1 + controller.value) - kl)
        controller.update(kl * rng.uniform(0.9, 1.1), 64)
        if step >= 2_000:
            tail.append(kl)
    assert sum(tail) / len(tail) == pytest.approx(target, rel=0.05)


# Bounds: no sequence of inputs leads out of them


@steering_kind
@settings(deadline=None)
@given(
    updates=st.lists(st.tuples(st.floats(), st.integers(0, 2**70)), max_size=30),
    target=positive_floats,
    gain=positive_floats,
    clip=positive_floats,
    high=st.none() | st.floats(0.1, sys.float_info.max),
)
@pytest.mark.filterwarnings("ignore:.*Controller skipped")
def test_nothing_poisons_it(kind, updates, target, gain, clip, high):
    own = {"horizon": gain, "clip": clip} if kind == "adaptive" else {"gain": gain}
    controller = MAKERS[kind](target=target, max_coef=high, **own)
    for current, n_steps in updates:
        value = controller.update(current, n_steps)
        assert type(value) is float
        assert controller.min_coef <= value <= (high or sys.float_info.max)
    assert controller.skipped == sum(not math.isfinite(current) for current, _ in updates)


def test_a_batch_beyond_five_horizons_does_not_turn_the_coefficient_negative():
    assert published_rule(0.1, 0.0, 50_001, 6.0, 10_000) < 0
    assert AdaptiveKLController(0.1, 6.0).update(0.0, 50_001) == 1e-6


@steering_kind
def test_bounds_are_reached_and_left_again(kind):
    controller = MAKERS[kind](min_coef=0.05, max_coef=0.2)
    for _ in range(50):
        controller.update(1e6, 10_000)
    assert controller.value == 0.2
    for _ in range(50):
        controller.update(-1e6, 10_000)
    assert controller.value == 0.05
    assert controller.update(1e6, 10_000) > 0.05


@pytest.mark.filterwarnings("ignore:.*updates the:RuntimeWarning")
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("kind", kinds.STEERING)
def test_the_default_upper_bound_is_1000_first_coefficients(kind, device):
    """A state of a run without a bound may be above it, and loads."""
    options = {"device": device, "max_coef": None}
    controller = kinds.make(kind, 0.5, 6.0, **options)
    assert controller.max_coef == 500.0
    for _ in range(200):
        controller.update(1e9, 10**9)
    assert controller.value == 500.0 or kind in ("pid-lagrangian", "nupi-linear", "control-vae")
    high = {**controller.state_dict(), "value": 1e4}
    controller.load_state_dict(high)
    assert controller.value == 1e4 >= controller.update(1e9, 10**9)
    assert controller.max_coef == 1e4
    with pytest.raises(ValueError, match="must be <= max_coef=500"):
        kinds.make(kind, 0.5, 6.0, max_coef=500.0).load_state_dict(high)
    assert kinds.make(kind, 0.5, 6.0, max_coef=math.inf).highest == sys.float_info.max
    assert kinds.make(kind, 0.0, 6.0, max_coef=None, floor=0.01).max_coef == 10.0


def test_exponential_overflow_without_upper_bound_stays_finite():
    controller = ExponentialKLController(max_coef=math.inf)
    assert controller.update(1e300) == sys.float_info.max
    assert controller.update(-1e300) == 1e-4


# NaN and inf


@every_kind
@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("wrap", [float, np.float32, torch.tensor], ids=lambda wrap: wrap.__name__)
def test_non_finite_kl_changes_nothing_and_warns_once(kind, bad, wrap):
    controller = MAKERS[kind]()
    with pytest.warns(RuntimeWarning, match="skipped a KL of") as caught:
        assert controller.update(wrap(bad)) == 0.1
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        controller.update(wrap(bad), 8)
    assert (controller.value, controller.skipped) == (0.1, 2)


@every_kind
def test_state_is_consistent_when_the_warning_is_an_error(kind):
    controller = MAKERS[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            controller.update(math.nan)
    assert (controller.value, controller.skipped) == (0.1, 1)


@every_kind
@pytest.mark.parametrize(
    "stats",
    [kl_stats([1.0, math.nan], [2.0, 2.0]), kl_stats([0.0, 0.0], [0.0, 0.0]), kl_stats([], [])],
    ids=["nan", "fully-masked", "empty"],
)
def test_stats_without_a_mean_change_nothing(kind, stats):
    """A batch that keeps no token says nothing about the policy: its KL is not 0."""
    controller = MAKERS[kind]()
    with pytest.warns(RuntimeWarning, match="skipped"):
        controller.update(stats)
    assert (controller.value, controller.skipped) == (0.1, 1)


# What `current` and `n_steps` may be


@pytest.mark.parametrize(
    "current",
    [
        9.0,
        9,
        np.float32(9),
        np.int64(9),
        np.array(9.0),
        torch.tensor(9.0),
        torch.tensor(9),
        torch.tensor(9.0, dtype=torch.bfloat16),
        torch.tensor(9.0, requires_grad=True),
    ],
    ids=lambda current: f"{type(current).__name__}-{getattr(current, 'dtype', '')}",
)
@pytest.mark.parametrize("wrap", [int, np.int32, torch.tensor], ids=lambda wrap: wrap.__name__)
def test_any_scalar_means_the_same_and_no_tensor_leaks_in(current, wrap):
    controller = AdaptiveKLController(0.1, 6.0)
    controller.update(current, wrap(64))
    assert type(controller.value) is float
    assert controller.value == published_rule(0.1, 9.0, 64, 6.0, 10_000)


@pytest.mark.parametrize(("unit", "mean"), [("sequence", 4.5), ("token", 0.9)])
@steering_kind
def test_unit_picks_the_mean_of_stats(kind, unit, mean):
    stats = kl_stats([3.0, 6.0, 0.0], [4.0, 6.0, 0.0])  # the last sequence is empty
    from_stats, by_hand = MAKERS[kind](unit=unit), MAKERS[kind](unit=unit)
    assert from_stats.update(stats) == by_hand.update(torch.tensor(mean), 3)


def test_n_steps_is_the_number_of_sequences_of_stats_unless_given():
    stats = kl_stats([9.0, 9.0], [3.0, 3.0])
    assert AdaptiveKLController(0.1, 6.0).update(stats) == published_rule(0.1, 9, 2, 6.0, 10_000)
    assert AdaptiveKLController(0.1, 6.0).update(stats, 64) == published_rule(0.1, 9, 64, 6, 10_000)
    assert AdaptiveKLController(0.1, 6.0).update(stats, 0) == 0.1


@pytest.mark.parametrize("kind", kinds.STEERING)
def test_any_thread_may_read_the_value_of_one_that_updates(kind):
    controller = kinds.make(kind, 0.5, 6.0)
    first = controller.value

    def work(number):
        if number:
            return {controller.value for _ in range(2000)}
        return {controller.update(3.0 + step % 7, 64) for step in range(200)}

    updated, *read = in_threads(work, 4)
    assert set().union(*read) <= updated | {first}


def test_adaptive_needs_n_steps_with_a_plain_number():
    controller = AdaptiveKLController(0.1, 6.0)
    with pytest.raises(TypeError) as error:
        controller.update(9.0)
    assert_one_line(error, "n_steps", "None")
    assert (controller.value, controller.skipped) == (0.1, 0)


@every_kind
@pytest.mark.parametrize("bad", [*NOT_NUMBERS, torch.ones(3, 40, 40)], ids=repr)
def test_current_must_be_a_number(kind, bad):
    controller = MAKERS[kind]()
    with pytest.raises(TypeError) as error:
        controller.update(bad, 8)
    assert_one_line(error, "current must be")
    assert (controller.value, controller.skipped) == (0.1, 0)


@every_kind
@pytest.mark.parametrize(
    ("bad", "error_type"),
    [(-1, ValueError), (1.5, TypeError), (64.0, TypeError), (True, TypeError), ("8", TypeError)],
)
def test_n_steps_must_be_a_count(kind, bad, error_type):
    controller = MAKERS[kind]()
    for current in (9.0, math.nan, kl_stats([9.0], [3.0])):
        with pytest.raises(error_type) as error:
            controller.update(current, bad)
        assert_one_line(error, "n_steps must be an integer >= 0", repr(bad))
    assert (controller.value, controller.skipped) == (0.1, 0)


@every_kind
@pytest.mark.parametrize(
    "huge",
    [2**5000, -(2**5000), 10**5000, Fraction(10**400, 3), Fraction(-(10**400), 3)],
    ids=["2**5000", "-2**5000", "10**5000", "10**400/3", "-10**400/3"],
)
def test_a_number_beyond_float64_is_skipped_like_inf(kind, huge):
    controller = MAKERS[kind]()
    before = controller.value
    sign = "-" if huge < 0 else ""
    with pytest.warns(RuntimeWarning, match=f"skipped a KL of {sign}inf;"):
        assert controller.update(huge, 1) == before
    assert controller.skipped == 1


@every_kind
@pytest.mark.parametrize("huge", [2**5000, 10**5000], ids=["2**5000", "10**5000"])
def test_n_steps_beyond_float64_is_refused(kind, huge):
    controller = MAKERS[kind]()
    with pytest.raises(ValueError, match="n_steps must be an integer >= 0 within float64") as error:
        controller.update(9.0, huge)
    assert_one_line(error)
    assert (controller.value, controller.skipped) == (0.1, 0)


def test_n_steps_may_be_the_largest_float64():
    controller = AdaptiveKLController(0.1, 6.0, max_coef=2.0)
    assert controller.update(9.0, int(sys.float_info.max)) == 2.0


@pytest.mark.parametrize("huge", [2**5000, -(10**5000)], ids=["2**5000", "-10**5000"])
def test_settings_beyond_float64_are_refused(huge):
    with pytest.raises(ValueError, match=f"target {POSITIVE}, got") as error:
        AdaptiveKLController(0.1, huge)
    assert_one_line(error)


# Settings


@pytest.mark.parametrize(
    ("kind", "setting"),
    [("adaptive", name) for name in ("target", "horizon", "clip", "min_coef", "max_coef")]
    + [("exponential", name) for name in ("target", "gain", "min_coef", "max_coef")],
)
def test_settings_must_be_positive_numbers(kind, setting):
    for bad in (0, -1.0, *NOT_FINITE):
        if setting == "max_coef" and bad == math.inf:  # no bound
            continue
        with pytest.raises(ValueError, match=f"{setting} must be") as error:
            MAKERS[kind](**{setting: bad})
        assert_one_line(error, repr(bad))
    for bad in (True, "6", [6.0], 6j, torch.ones(2)):
        with pytest.raises(TypeError, match=f"{setting} must be"):
            MAKERS[kind](**{setting: bad})


@pytest.mark.parametrize(
    ("bad", "error_type"),
    [
        (-0.1, ValueError),
        *[(x, ValueError) for x in NOT_FINITE],
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_first_coefficient_must_be_a_number(bad, error_type):
    for make in (
        FixedKLController,
        ExponentialKLController,
        lambda kl_coef: AdaptiveKLController(kl_coef, 6.0),
    ):
        with pytest.raises(error_type, match="kl_coef must be"):
            make(bad)


@pytest.mark.parametrize("bad", [0, 0.0, 9e-7, 1.1])
def test_first_coefficient_outside_the_bounds_is_an_error_not_repaired(bad):
    with pytest.raises(ValueError, match="init_kl_coef must be"):
        AdaptiveKLController(bad, 6.0, max_coef=1.0)
    with pytest.raises(ValueError, match="init_kl_coef must be"):
        ExponentialKLController(bad, max_coef=1.0)
    assert AdaptiveKLController(1.0, 6.0, min_coef=1.0, max_coef=1.0).value == 1.0


@steering_kind
def test_upper_bound_below_lower_is_an_error(kind):
    with pytest.raises(ValueError, match="max_coef must be"):
        MAKERS[kind](min_coef=0.05, max_coef=0.04)


@steering_kind
@pytest.mark.parametrize(("unit", "error_type"), [("tokens", ValueError), (None, TypeError)])
def test_unknown_unit_lists_the_right_ones(kind, unit, error_type):
    with pytest.raises(error_type) as error:
        MAKERS[kind](unit=unit)
    assert_one_line(error, repr(unit), "'sequence'", "'token'")


@every_kind
def test_settings_and_value_are_plain_python(kind):
    options = dict.fromkeys({"target", "min_coef"} if kind != "fixed" else (), np.float32(0.0625))
    controller = MAKERS[kind](**options)
    fields = {name: value for name, value in vars(controller).items() if value is not None}
    fields |= fields.pop("_state")
    assert {type(value) for value in fields.values()} <= {float, int, str}
    with pytest.raises(AttributeError):
        controller.value = 3.0


# The factory


def test_factory_without_target_is_fixed():
    for controller in (get_kl_controller(0.1), get_kl_controller(0.1, None, 777)):
        assert type(controller) is FixedKLController
        assert controller.value == 0.1


def test_factory_with_target_is_adaptive():
    controller = get_kl_controller(0.1, 0.2, 500, clip=0.3, unit="token", min_coef=1e-3, max_coef=2)
    assert type(controller) is AdaptiveKLController
    direct = AdaptiveKLController(0.1, 0.2, 500, clip=0.3, unit="token", min_coef=1e-3, max_coef=2)
    assert vars(controller) == vars(direct)


def test_factory_knows_every_option_of_the_adaptive_controller():
    parameters = inspect.signature(TargetController).parameters.values()
    shared = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert ("clip", *shared) == ADAPTIVE_OPTIONS
    assert {*shared} == {*TargetOptions.__annotations__}


@pytest.mark.parametrize("cls", CONTROLLERS.values())
def test_a_signature_shows_every_option(cls):
    """The scheduled controller hands its ``**options`` on to another one."""
    own = inspect.signature(cls).parameters
    expected = {"unit", "device", "process_group"}
    if issubclass(cls, TargetController):
        expected = {*inspect.signature(TargetController).parameters}
        assert "options" not in own
    assert expected <= {*own}
    with pytest.raises(TypeError, match="unexpected"):
        cls(0.5, 6.0, nonsense=1)


@pytest.mark.parametrize("target", [None, 6.0])
def test_factory_refuses_an_unknown_option(target):
    with pytest.raises(TypeError) as error:
        get_kl_controller(0.1, target, gain=0.1)
    assert_one_line(error, "unknown option 'gain'", *ADAPTIVE_OPTIONS)


def test_factory_refuses_options_of_a_fixed_coefficient():
    with pytest.raises(TypeError) as error:
        get_kl_controller(0.1, clip=0.3)
    assert_one_line(error, "target must be", "clip")


def test_factory_checks_settings():
    for bad in ({"target": 0}, {"target": 6, "horizon": 0}, {"target": 6, "clip": -1}):
        with pytest.raises(ValueError, match=f"{list(bad)[-1]} must be"):
            get_kl_controller(0.1, **bad)


# Checkpoints


def run(controller, seed, steps=500):
    rng = random.Random(seed)
    return [controller.update(rng.lognormvariate(0, 2), rng.randrange(512)) for _ in range(steps)]


@every_kind
@pytest.mark.parametrize(
    "carry_over",
    [
        lambda controller, fresh: (
            fresh.load_state_dict(json.loads(json.dumps(controller.state_dict()))) or fresh
        ),
        lambda controller, fresh: copy.deepcopy(controller),
        lambda controller, fresh: copy.copy(controller),
        lambda controller, fresh: pickle.loads(pickle.dumps(controller)),
    ],
    ids=["json", "deepcopy", "copy", "pickle"],
)
def test_a_resumed_run_continues_bit_for_bit(kind, carry_over):
    controller = MAKERS[kind]()
    run(controller, seed=1)
    with pytest.warns(RuntimeWarning):
        controller.update(math.nan)
    resumed = carry_over(controller, MAKERS[kind]())
    assert resumed.skipped == 1
    assert resumed.state_dict() == controller.state_dict()
    at_checkpoint = controller.value
    continued = run(resumed, seed=2)
    assert controller.value == at_checkpoint  # the two share nothing
    assert continued == run(controller, seed=2)


@every_kind
def test_state_is_plain_json(kind):
    controller = MAKERS[kind]()
    settings = {} if kind == "fixed" else {"unit": controller.unit, "target": controller.target}
    expected = {"kind": kind, "version": 1, **settings, "skipped": 0, "value": 0.1}
    assert controller.state_dict() == expected
    assert json.loads(json.dumps(expected, allow_nan=False)) == expected


def test_settings_stay_those_of_the_resuming_object():
    controller = AdaptiveKLController(0.1, 6.0)
    controller.load_state_dict(AdaptiveKLController(0.5, 12.0, 500).state_dict())
    assert controller.update(9.0, 64) == published_rule(0.5, 9.0, 64, 6.0, 10_000)
    assert controller.state_dict()["target"] == 6.0


@steering_kind
@pytest.mark.parametrize(
    ("change", "error_type"),
    [
        ({"unit": "tokens"}, ValueError),
        ({"unit": None}, ValueError),
        ({"target": 0.0}, ValueError),
        ({"target": math.nan}, ValueError),
        ({"target": "6"}, TypeError),
        ({"target": None}, TypeError),
    ],
    ids=str,
)
def test_a_damaged_unit_or_target_is_refused(kind, change, error_type):
    controller = MAKERS[kind]()
    with pytest.raises(error_type) as error:
        controller.load_state_dict({**controller.state_dict(), "value": 0.2, **change})
    assert_one_line(error, f"state['{next(iter(change))}'] must be")
    assert controller.value == 0.1


@every_kind
def test_state_of_another_kind_is_refused(kind):
    controller = MAKERS[kind]()
    for other in (*[make() for make in MAKERS.values()], KLMonitor(6.0)):
        state = other.state_dict()
        if state["kind"] != kind:
            with pytest.raises(ValueError, match="kind") as error:
                controller.load_state_dict(state)
            assert_one_line(error, repr(kind), repr(state["kind"]))


@every_kind
@pytest.mark.parametrize(
    ("change", "error_type", "named"),
    [
        ({"kind": None}, ValueError, "kind"),
        ({"version": 2, "more": 1}, ValueError, "version"),
        ({"version": True}, ValueError, "version"),
        ({"value": math.nan}, ValueError, "value"),
        ({"value": math.inf}, ValueError, "value"),
        ({"value": -0.1}, ValueError, "value"),
        ({"value": "0.2"}, TypeError, "value"),
        ({"value": True}, TypeError, "value"),
        ({"value": None}, TypeError, "value"),
        ({"value": 0.2, "skipped": -1}, ValueError, "skipped"),
        ({"value": 0.2, "skipped": 1.0}, TypeError, "skipped"),
        ({"value": 0.2, "skipped": None}, TypeError, "skipped"),
        ({"value": 0.2, "horizon": 6.0}, ValueError, "keys"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_whole(kind, change, error_type, named):
    controller = MAKERS[kind]()
    with pytest.raises(error_type) as error:
        controller.load_state_dict({**controller.state_dict(), "skipped": 5, **change})
    assert_one_line(error, named)
    assert (controller.value, controller.skipped) == (0.1, 0)


@every_kind
def test_a_state_with_a_missing_key_is_refused(kind):
    controller = MAKERS[kind]()
    for key in controller.state_dict().keys() - {"unit", "target"}:  # which older states lack
        state = {**controller.state_dict(), "value": 0.2}
        del state[key]
        with pytest.raises(ValueError, match=key):
            controller.load_state_dict(state)
    assert controller.value == 0.1


@every_kind
@pytest.mark.parametrize("bad", [None, [], "state", 0.1])
def test_a_state_must_be_a_dict(kind, bad):
    with pytest.raises(TypeError, match="state must be a dict"):
        MAKERS[kind]().load_state_dict(bad)


@steering_kind
@pytest.mark.parametrize("value", [0.0, 0.04, 0.21])
def test_a_value_outside_the_bounds_is_refused_not_repaired(kind, value):
    controller = MAKERS[kind](min_coef=0.05, max_coef=0.2)
    with pytest.raises(ValueError, match="value"):
        controller.load_state_dict({**controller.state_dict(), "value": value})
    assert controller.value == 0.1


@every_kind
def test_repr_shows_value_and_settings(kind):
    controller = MAKERS[kind]()
    assert repr(controller).startswith(f"{type(controller).__name__}(value=0.1, ")
    if kind != "fixed":
        assert f"target={controller.target}" in repr(controller)
