"""Controllers against independent statements of their sources. Options, bounds and schedules."""

import math
import random
import sys
from types import SimpleNamespace

import control_rules
import pytest
import readme
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import STEERING, make

import klfast
from klfast.controllers import CONTROLLERS, rules
from lab.settings import ARMS

WIDE = {"min_coef": 1e-300, "max_coef": 1e300}
every_kind = pytest.mark.parametrize("kind", STEERING)
constant_target = pytest.mark.parametrize("kind", [k for k in STEERING if k != "scheduled"])
STALLS = pytest.mark.filterwarnings("ignore:.*100 updates:RuntimeWarning")

# Each row: class, source, options, the source's options, relative error
SOURCES = {
    "adaptive": (klfast.AdaptiveKLController, control_rules.Ziegler, {}, {}, 0),
    "adaptive-fast": (
        *(klfast.AdaptiveKLController, control_rules.Ziegler),
        {"horizon": 320.0, "clip": 0.05},
        {"horizon": 320.0, "clip": 0.05},
        0,
    ),
    "exponential": (klfast.ExponentialKLController, control_rules.Exponential, {}, {}, 0),
    "nupi": (klfast.NuPIKLController, control_rules.NuPI, {}, {}, 1e-11),
    "nupi-averaged": (klfast.NuPIKLController, control_rules.NuPI, {"nu": 0.9}, {"nu": 0.9}, 1e-11),
    "nupi-linear": (
        *(klfast.NuPIKLController, control_rules.NuPI),
        {"scale": "linear", "kp": 0.01, "ki": 0.001, "nu": 0.5},
        {"log": False, "kp": 0.01, "ki": 0.001, "nu": 0.5},
        1e-11,
    ),
    "pid-lagrangian": (
        klfast.PIDLagrangianKLController,
        control_rules.PIDLagrangian,
        {},
        {},
        1e-11,
    ),
    "pid-lagrangian-gains": (
        *(klfast.PIDLagrangianKLController, control_rules.PIDLagrangian),
        {"kp": 0.5, "ki": 0.002, "kd": 1.5, "p_ema": 0.8, "d_ema": 0.8, "d_delay": 3},
        {"kp": 0.5, "ki": 0.002, "kd": 1.5, "ema": 0.8, "delay": 3},
        1e-11,
    ),
    "dual": (klfast.DualKLController, control_rules.Dual, {}, {}, 1e-11),
    "doubling": (klfast.DoublingKLController, control_rules.Doubling, {}, {}, 0),
    "doubling-published": (
        *(klfast.DoublingKLController, control_rules.Doubling, {"every": 1}, {"every": 1}),
        0,
    ),
    "control-vae": (klfast.ControlVAEKLController, control_rules.ControlVAE, {}, {}, 1e-11),
}


def test_every_controller_is_public_in_the_table_and_has_a_source():
    """The scheduled controller has no source, because another controller moves it."""
    own = {cls for cls in klfast.TargetController.__subclasses__() if "klfast.c" in cls.__module__}
    assert {*CONTROLLERS.values()} == own | {klfast.ScheduledKLController}
    assert {cls for cls, *_ in SOURCES.values()} == own
    page = (readme.ROOT / "docs" / "controllers.md").read_text()
    for cls in CONTROLLERS.values():
        assert getattr(klfast, cls.__name__) is cls
        assert f"\n| `{cls.__name__}(" in page
    assert {name for name, arm in ARMS.items() if arm.steers} <= CONTROLLERS.keys()


@pytest.mark.parametrize("target", [6.0, 0.1])
@pytest.mark.parametrize("name", SOURCES)
def test_a_rule_is_that_of_its_source(name, target):
    cls, source, options, gains, error = SOURCES[name]
    rng = random.Random(name)
    controller, published = cls(2.0, target, **WIDE, **options), source(2.0, target, **gains)
    moved = set()
    for _ in range(300):
        kl, n_steps = target * rng.lognormvariate(0, 0.7), rng.choice((0, 1, 8, 64, 256))
        published.update(kl, n_steps)
        assert controller.update(kl, n_steps) == pytest.approx(published.value, rel=error, abs=0)
        moved.add(controller.value)
    assert len(moved) > 3
    assert 1e-300 < controller.value < 1e300  # no bound was reached


BY_HAND = {
    "nupi's first step is its integral part alone": (
        klfast.NuPIKLController(0.5, 6.0, kp=100.0, ki=0.25, nu=0.7),
        [9.0],
        [0.5 * math.exp(0.25 * 0.5)],
    ),
    "a dead band is around the scheduled target": (
        klfast.ScheduledKLController(
            0.5, 6.0, steps=1, final=2.0, controller=klfast.DualKLController, dead_band=0.1, lr=1.0
        ),
        [6.0, 12.0, 6.0],
        [0.5, 0.5, 0.5 * math.exp(-0.5)],  # from the second update on the target is 12
    ),
    "a batch beyond five horizons does not turn the coefficient negative": (
        klfast.AdaptiveKLController(0.1, 6.0, 10.0),
        [0.0, 6.0],
        [1e-6, 1e-6],
    ),
    "without an upper bound an overflow stays finite": (
        klfast.ExponentialKLController(max_coef=math.inf),
        [1e300, -1e300],
        [sys.float_info.max, 1e-4],
    ),
}


@pytest.mark.parametrize(("controller", "kls", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_values_by_hand(controller, kls, expected):
    assert [controller.update(kl, 64) for kl in kls] == pytest.approx(expected, rel=1e-9)


def test_a_rule_that_gives_nan_leaves_the_coefficient():
    settings = SimpleNamespace(lowest=0.01, highest=10.0, floor=0.01)
    for limit in (rules.bounded, rules.bounded_or_zero, rules.bounded_or_absorbed):
        assert limit(settings, 0.5, math.nan) == 0.5


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize(
    "curve",
    [{}, {"warmup": 7, "steps": 20}, {"warmup": 3, "steps": 5, "start": 0.5, "final": 2.0}],
    ids=["default", "warmup", "rising"],
)
def test_a_schedule_of_the_coefficient(shape, curve):
    controller = klfast.ScheduledKLController(0.3, shape=shape, **curve)
    for t in range(1_000):
        expected = 0.3 * control_rules.schedule(t, shape, **curve)
        assert controller.value == pytest.approx(expected, rel=1e-14, abs=1e-15)
        assert controller.update(5.0) == controller.value
    assert klfast.ScheduledKLController(0.3, shape=shape, steps=1).update(6.0) == 0.0
    small = klfast.ScheduledKLController(0.3, 6.0, shape=shape, steps=1, final=1e-17)
    assert small.update(6.0) < small.update(6.0)  # a target of 0 would raise


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_schedule_of_the_target_of_another_controller(shape):
    curve = {"warmup": 4, "steps": 9, "start": 2.0, "final": 0.5}
    controller = klfast.ScheduledKLController(
        0.2, 6.0, shape=shape, controller=klfast.AdaptiveKLController, horizon=500, **curve
    )
    value, rng = 0.2, random.Random(1)
    for t in range(30):
        target, kl = 6.0 * control_rules.schedule(t, shape, **curve), rng.uniform(3, 9)
        rule = control_rules.Ziegler(value, target, 500)
        rule.update(kl, 64)
        value = controller.update(kl, 64)
        assert value == pytest.approx(rule.value, rel=1e-13)
    assert controller.target == 6.0
    assert "rule='adaptive'" in repr(controller)
    assert repr(controller).count("value=") == 1


@constant_target
def test_nothing_moves_within_the_dead_band_and_outside_it_the_rule_is_as_without(kind):
    controller, without = make(kind, 0.5, 6.0, dead_band=0.25), make(kind, 0.5, 6.0)
    before = controller.state_dict()
    for kl in (6.0, 7.5, 4.5, 7.0):
        assert controller.update(kl, 64) == 0.5
    assert controller.state_dict() == before
    for kl in (7.6, 4.4, 30.0, -1.0):
        assert controller.update(kl, 64) == without.update(kl, 64)


@every_kind
@pytest.mark.filterwarnings("ignore:.*skipped a KL:RuntimeWarning")
def test_the_rule_sees_the_average_of_finite_kls(kind):
    averaged, plain, average = make(kind, 0.5, 6.0, ema=0.75), make(kind, 0.5, 6.0), None
    for kl in (math.nan, 8.0, 2.0, math.inf, 40.0, 6.5, 6.0):
        if not math.isfinite(kl):
            averaged.update(kl, 64)
            continue
        average = kl if average is None else 0.75 * average + 0.25 * kl
        assert averaged.update(kl, 64) == plain.update(average, 64)


@STALLS
@every_kind
def test_a_floor_lets_the_coefficient_leave_0_however_long_the_kl_was_low(kind):
    controller = make(kind, 0.0, 6.0, floor=0.01)
    assert controller.value == 0.0
    for _ in range(200):
        assert controller.update(0.5, 640) == 0.0  # below the target no penalty is needed
    updates = 0
    while controller.value == 0.0:
        controller.update(18.0, 640)
        updates += 1
        assert updates <= 15
    assert controller.value >= 0.01


@every_kind
@settings(max_examples=30)
@given(
    updates=st.lists(st.tuples(st.floats(), st.integers(0, 10**300)), max_size=20),
    target=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    high=st.sampled_from([None, 0.5, 3.0, sys.float_info.max, math.inf]),
    ema=st.sampled_from([0.0, 0.5]),
)
@pytest.mark.filterwarnings("ignore:.*skipped a KL:RuntimeWarning")
def test_nothing_poisons_it(kind, updates, target, high, ema):
    controller = make(kind, 0.5, target, max_coef=high, ema=ema)
    for kl, n_steps in updates:
        before = controller.value
        value = controller.update(kl, n_steps)
        assert type(value) is float
        assert controller.min_coef <= value <= controller.highest
        assert math.isfinite(kl) or value == before
    assert controller.skipped == sum(not math.isfinite(kl) for kl, _ in updates)
    assert all(map(math.isfinite, controller.state_dict().get("memory", {}).values()))


@STALLS
@every_kind
def test_the_default_upper_bound_is_1000_first_coefficients(kind):
    """A state of a run without a bound may be above the bound, and loads."""
    controller = make(kind, 0.5, 6.0, max_coef=None)
    assert controller.max_coef == 500.0
    for _ in range(200):
        controller.update(1e9, 10**9)
    assert controller.value == 500.0 or kind in ("pid-lagrangian", "nupi-linear", "control-vae")
    high = {**controller.state_dict(), "value": 1e4}
    controller.load_state_dict(high)
    assert controller.value == 1e4 >= controller.update(1e9, 10**9)
    assert controller.max_coef == 1e4
    with pytest.raises(ValueError, match="must be <= max_coef=500"):
        make(kind, 0.5, 6.0, max_coef=500.0).load_state_dict(high)
    assert make(kind, 0.0, 6.0, max_coef=None, floor=0.01).max_coef == 10.0


@STALLS
@pytest.mark.parametrize("kind", [kind for kind in STEERING if kind != "scheduled"])
@pytest.mark.parametrize(
    ("bound", "drives", "leaves"),
    [({"max_coef": 1.0}, 60.0, 0.0), ({"min_coef": 0.2}, 0.0, 60.0)],
    ids=["upper", "lower"],
)
def test_bounds_are_reached_and_left_again(kind, bound, drives, leaves):
    """Integrals do not wind up, however long the KL was off."""
    controller = make(kind, 0.5, 6.0, **bound)
    (edge,) = bound.values()
    for _ in range(1_000):
        controller.update(drives, 640)
    assert controller.value == edge
    for _ in range(60):
        controller.update(leaves, 640)
    assert abs(controller.value - edge) > 0.1
