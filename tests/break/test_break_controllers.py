"""Controllers against their published rules, in plain floats, and against every bad argument."""

import copy
import itertools
import json
import math
import pickle
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint

import klfast
from klfast import AdaptiveKLController, ExponentialKLController, FixedKLController

CATEGORY = "controllers"
NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore:.*skipped a KL:RuntimeWarning")
UNITS = pytest.mark.filterwarnings("ignore:.*did you mean unit=:RuntimeWarning")


class Ziegler:
    """The published adaptive rule, as lm-human-preferences has it, with klfast's bounds."""

    def __init__(self, value, target, horizon, clip=0.2, least=1e-6, most=None):
        self.value, self.target, self.horizon = value, target, horizon
        self.clip, self.least, self.most = clip, least, most

    def update(self, current, n_steps):
        error = min(max(current / self.target - 1, -self.clip), self.clip)
        value = self.value * (1 + error * n_steps / self.horizon)
        value = max(value, self.least)
        self.value = value if self.most is None else min(value, self.most)


class Exponential:
    def __init__(self, value, target, gain, least=1e-4, most=10.0):
        self.value, self.target, self.gain = value, target, gain
        self.least, self.most = least, most

    def update(self, current, _):
        try:
            factor = math.exp(self.gain * (current - self.target))
        except OverflowError:
            factor = INF
        self.value = min(max(self.value * factor, self.least), self.most)


def test_5000_steps_of_the_published_rules_bit_for_bit(hunt):
    for target, horizon, clip, most in itertools.product(
        (6.0, 0.1), (10_000, 320.0), (0.2, 0.05), (None, 0.5)
    ):
        rule = Ziegler(0.05, target, horizon, clip, most=most)
        ours = AdaptiveKLController(0.05, target, horizon, clip=clip, max_coef=most or INF)
        for step in range(5000 if hunt.whole else 500):
            current = target * hunt.random.lognormvariate(0, 1)
            n_steps = hunt.random.choice((0, 1, 8, 64, 256))
            rule.update(current, n_steps)
            ours.update(current, n_steps)
            hunt.equal(ours.value, rule.value, target, horizon, clip, most, step)
    for target, gain in itertools.product((0.1, 6.0), (0.1, 1.0)):
        rule = Exponential(0.1, target, gain)
        ours = ExponentialKLController(0.1, target, gain=gain)
        for step in range(5000 if hunt.whole else 500):
            current = target * hunt.random.lognormvariate(0, 1)
            rule.update(current, 1)
            ours.update(current)
            hunt.equal(ours.value, rule.value, target, gain, step)


SEQUENCES = {
    "zeros": [0.0] * 20,
    "at the target": [6.0] * 20,
    "negative": [-1.0, -1e300, -5e-324] * 5,
    "huge": [1e308, 1.7e308, 1e300] * 5,
    "tiny": [5e-324, 1e-300] * 5,
    "to and fro": [0.0, 100.0] * 10,
    "ints": [0, 3, 6, 12, 2**60],
    "fractions": [Fraction(1, 3), Fraction(20, 3)] * 5,
    "tensors": [torch.tensor(6.5), torch.tensor(3, dtype=torch.int32)] * 5,
    "half tensors": [torch.tensor(6.5).half(), torch.tensor(7.25).bfloat16()] * 5,
    "numpy": [np.float32(6.5), np.int64(7), np.array(5.5)] * 5,
    "nan": [NAN, 7.0, INF, 5.0, -INF, torch.tensor(NAN), 2**5000, -(2**5000)] * 3,
}
STEPS = (0, 1, 7, 256, 10_000, 10**9, 10**300)


def controllers():
    return {
        "fixed": lambda: FixedKLController(0.05),
        "adaptive": lambda: AdaptiveKLController(0.05, 6.0),
        "bounded": lambda: AdaptiveKLController(0.05, 6.0, 10.0, min_coef=0.01, max_coef=0.1),
        "exponential": lambda: ExponentialKLController(0.05, 6.0),
        "unbounded": lambda: ExponentialKLController(0.05, 6.0, gain=100, max_coef=INF),
        "made": lambda: klfast.get_kl_controller(0.05, 6.0, clip=0.5),
        **{kind.__name__: lambda k=kind: k(0.05, 6.0) for kind in OF_FEEDBACK},
        "nupi, linear": lambda: klfast.NuPIKLController(0.05, 6.0, scale="linear", nu=0.5),
        "all options": lambda: klfast.DualKLController(
            0.05, 6.0, dead_band=0.1, ema=0.5, max_coef=2.0
        ),
        "scheduled": lambda: klfast.ScheduledKLController(0.05, shape="cosine", warmup=3, steps=9),
        "scheduled target": lambda: klfast.ScheduledKLController(0.05, 6.0, steps=9, final=0.5),
    }


def as_float(current):
    value = current.item() if hasattr(current, "item") else current
    try:
        return float(value)
    except OverflowError:
        return INF if value > 0 else -INF


def test_sequences_keep_a_float_inside_its_bounds_and_skip_what_is_not_finite(hunt):
    for (kind, make), (what, sequence), n_steps in itertools.product(
        controllers().items(), SEQUENCES.items(), STEPS
    ):
        controller, skipped = make(), 0
        low, high = controller.min_coef, controller.max_coef or torch.finfo(torch.float64).max
        for current in sequence:
            before = controller.value
            value = controller.update(current, n_steps)
            case = (kind, what, n_steps, current)
            finite = math.isfinite(as_float(current))
            skipped += not finite
            hunt.check(type(value) is float and low <= value <= high, *case, got=value)
            hunt.equal(controller.skipped, skipped, *case)
            still = n_steps == 0 and kind in ("adaptive", "bounded", "made")
            if not finite or still or kind == "fixed":
                hunt.equal(value, before, *case)


def test_copies_and_states_go_on_bit_for_bit(hunt):
    ways = {
        "pickle": lambda c, _: pickle.loads(pickle.dumps(c)),
        "deepcopy": lambda c, _: copy.deepcopy(c),
        "copy": lambda c, _: copy.copy(c),
        "state": lambda c, make: load(make(), c.state_dict()),
        "JSON": lambda c, make: load(make(), json.loads(json.dumps(c.state_dict()))),
    }
    for (kind, make), (way, again) in itertools.product(controllers().items(), ways.items()):
        controller = make()
        for step in range(40):
            controller.update(hunt.random.lognormvariate(2, 1), hunt.random.randrange(300))
            other = again(controller, make)
            hunt.equal(other.state_dict(), controller.state_dict(), kind, way, step)
            hunt.equal(repr(other), repr(controller), kind, way, step)
            current, n_steps = hunt.random.lognormvariate(2, 1), hunt.random.randrange(300)
            before = controller.value
            expected = copy.deepcopy(controller).update(current, n_steps)
            hunt.equal(other.update(current, n_steps), expected, kind, way, step)
            hunt.equal(controller.value, before, kind, way, step, "is another")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_states_of_any_age_go_through_a_distributed_checkpoint(hunt, tmp_path):
    """Whatever was saved loads into an object that has seen more, less or nothing."""
    kinds, ages = {**controllers(), **penalties()}, (0, 1, 4, 30)
    for (kind, make), saved, before in hunt.some(itertools.product(kinds.items(), ages, ages)):
        source, target = aged(make(), saved), aged(make(), before)
        folder, state = tmp_path / f"{kind} {saved} {before}", {"thing": target.state_dict()}
        checkpoint.save({"thing": source.state_dict()}, checkpoint_id=folder)
        checkpoint.load(state, checkpoint_id=folder)
        target.load_state_dict(state["thing"])
        hunt.equal(target.state_dict(), source.state_dict(), kind, saved, before)


def penalties():
    return {
        f"penalty, {kind}": lambda make=make: klfast.KLPenalty("k2", controller=make())
        for kind, make in controllers().items()
    }


def aged(thing, times):
    """After so many updates; or calls, of which every fourth ends a batch."""
    for number in range(1, times + 1):
        if not isinstance(thing, klfast.KLPenalty):
            thing.update(5.0 + number, 8)
            continue
        thing(torch.full((number % 3, 2), -1.0), torch.rand(number % 3, 2))
        if number % 4 == 0:
            thing.step()
    return thing


def load(controller, state):
    controller.load_state_dict(state)
    return controller


def stats(kl, length):
    kl, length = torch.tensor(kl), torch.tensor(length)
    rest = [torch.zeros_like(kl)] * 6
    return klfast.KLStats(kl, length, *rest)


@UNITS
def test_statistics_are_read_by_their_unit(hunt):
    for unit, make in itertools.product(
        ("sequence", "token"),
        (
            lambda u: AdaptiveKLController(0.05, 6.0, unit=u),
            lambda u: ExponentialKLController(0.05, 6.0, unit=u),
        ),
    ):
        for _ in range(50):
            count = hunt.random.randrange(1, 9)
            kl = [hunt.random.uniform(0, 20) for _ in range(count)]
            length = [float(hunt.random.randrange(0, 9)) for _ in range(count)]
            kl = [k if n else 0.0 for k, n in zip(kl, length, strict=True)]
            given = stats(kl, length)
            kept = sum(n > 0 for n in length)
            total = given.kl.sum().item()
            ours, rule = make(unit), make(unit)
            if not kept:
                hunt.equal(ours.update(given), 0.05, unit, kl, length)
                hunt.equal(ours.skipped, 1, unit, kl, length)
                continue
            mean = torch.tensor(total) / (kept if unit == "sequence" else sum(length))
            rule.update(mean, count)
            hunt.equal(ours.update(given), rule.value, unit, kl, length)


NOT_NUMBERS = ("1", b"1", None, True, [1.0], (1.0,), {}, 1j, Decimal(1), object(), len)
TENSORS = (torch.ones(1), torch.ones(2, 2), torch.tensor(True), torch.tensor(1j), np.ones(2))
NOT_FINITE = (NAN, INF, -INF, 2**5000, Fraction(-(2**5000), 3))
NOT_POSITIVE = (0, -1, 0.0, -1e-300, Fraction(-1, 3))
NOT_COUNTS = ("1", None, True, 1.0, 1.5, NAN, [1], -1, -(2**70), 2**5000, torch.tensor(1.5), 1j)


OF_FEEDBACK = {
    klfast.NuPIKLController: {"kp": (), "ki": (0,), "nu": (1, 1.5), "scale": ("ln", "")},
    klfast.PIDLagrangianKLController: {
        "kp": (),
        "ki": (0,),
        "kd": (),
        "p_ema": (1, 2.0),
        "d_ema": (1, 2.0),
        "d_delay": (0, 1.5),
    },
    klfast.DualKLController: {"lr": (0,)},
    klfast.DoublingKLController: {"factor": (1, 0.5), "threshold": (0.99,), "every": (0, 2.5)},
    klfast.ControlVAEKLController: {"kp": (0,), "ki": (0,)},
}
"""The settings of each rule, and what is bad of them beside what is bad of every number."""
BAD_OPTIONS = {
    "dead_band": (*NOT_NUMBERS, *NOT_FINITE, -1, -1e-300),
    "ema": (*NOT_NUMBERS, *NOT_FINITE, -1, 1, 1.5),
    "floor": (*(bad for bad in NOT_NUMBERS if bad is not None), *NOT_FINITE, *NOT_POSITIVE),
    "unit": ("", "Sequence", "tokens", None, 1, True, ["token"]),
    "device": (1, 1.0, True, [], "abacus", object()),
    "process_group": (1, "gloo", True, [], object()),
}


def test_bad_settings_are_refused(hunt):
    good = {"init_kl_coef": 0.1, "target": 6.0}
    numbers = {
        AdaptiveKLController: ("init_kl_coef", "target", "horizon", "clip", "min_coef", "max_coef"),
        ExponentialKLController: ("init_kl_coef", "target", "gain", "min_coef", "max_coef"),
    }
    for kind, arguments in numbers.items():
        for name, bad in itertools.product(
            arguments, (*NOT_NUMBERS, *TENSORS, *NOT_FINITE, *NOT_POSITIVE)
        ):
            if name == "max_coef" and (bad is None or bad is INF):
                continue
            given = {**good, name: bad}
            hunt.refuses(lambda k=kind, g=given: k(**g), name, kind.__name__, name, bad)
        for bad in ("", "Sequence", "tokens", None, 1, True, ["token"]):
            hunt.refuses(lambda k=kind, b=bad: k(**good, unit=b), "unit", kind.__name__, bad)
        hunt.refuses(lambda k=kind: k(**good, min_coef=1.0, max_coef=0.5), "max_coef", kind)
        hunt.refuses(lambda k=kind: k(**good, min_coef=0.5, max_coef=1), "init_kl_coef", kind)
        hunt.refuses(lambda k=kind: k(5.0, 6.0, max_coef=1.0), "init_kl_coef", kind)
    for kind, names in OF_FEEDBACK.items():
        shared = ("init_kl_coef", "target", "clip", "min_coef", "max_coef")
        for name in (*(n for n in shared if n != "clip" or kind.__name__[:4] != "Doub"), *names):
            for bad in (*NOT_NUMBERS, *TENSORS, *NOT_FINITE, -1, -1e-300, *names.get(name, ())):
                if name == "max_coef" and (bad is None or bad is INF):
                    continue
                given = {**good, name: bad}
                hunt.refuses(lambda k=kind, g=given: k(**g), name, kind.__name__, name, bad)
        for name, bads in BAD_OPTIONS.items():
            for bad in bads:
                given = {**good, name: bad}
                hunt.refuses(lambda k=kind, g=given: k(**g), name, kind.__name__, name, bad)
        hunt.refuses(lambda k=kind: k(**good, what=1), "what", kind.__name__)
    for bad in (*NOT_NUMBERS, *TENSORS, *NOT_FINITE, -1, -1e-300):
        hunt.refuses(lambda b=bad: FixedKLController(b), "kl_coef", "fixed", bad)
        hunt.refuses(lambda b=bad: klfast.get_kl_controller(b), "kl_coef", "made", bad)
        hunt.refuses(lambda b=bad: klfast.get_kl_controller(b, 6.0), "init_kl_coef", "made", bad)
        if bad is not None:
            hunt.refuses(lambda b=bad: klfast.get_kl_controller(0.1, b), "target", "made", bad)
    for options in ({"gain": 1}, {"clip": 0.1, "what": 2}, {"minimum": 0}):
        name = next(key for key in options if key != "clip")
        hunt.refuses(lambda o=options: klfast.get_kl_controller(0.1, 6.0, **o), name, options)
    hunt.refuses(lambda: klfast.get_kl_controller(0.1, clip=0.1), "target", "clip alone")


def test_bad_updates_are_refused_and_change_nothing(hunt):
    for kind, make in controllers().items():
        for bad in (*NOT_NUMBERS, *TENSORS):
            controller = make()
            hunt.refuses(lambda c=controller, b=bad: c.update(b, 1), "current", kind, bad)
            hunt.equal(controller.state_dict(), make().state_dict(), kind, bad)
        for bad in NOT_COUNTS:
            if bad is None:
                continue
            controller = make()
            hunt.refuses(lambda c=controller, b=bad: c.update(1.0, b), "n_steps", kind, bad)
            hunt.equal(controller.state_dict(), make().state_dict(), kind, bad)
    for kind in ("adaptive", "bounded", "made"):
        hunt.refuses(lambda k=kind: controllers()[k]().update(1.0), "n_steps", kind)


def test_bad_states_are_refused_and_change_nothing(hunt):
    for kind, make in controllers().items():
        good = make().state_dict()
        changes = [("kind", bad) for bad in ("other", None, 1, b"fixed")]
        changes += [("version", bad) for bad in (0, 2, "1", None, True, 1.0)]
        changes += [("skipped", bad) for bad in (-1, 1.5, "0", None, True, NAN)]
        changes += [("value", bad) for bad in ("0.1", None, True, NAN, INF, -1.0, [0.1], 2**5000)]
        changes += [("value", 0.001), ("value", 99.0)] if kind == "bounded" else []
        if "target" in good:
            changes += [("unit", bad) for bad in ("tokens", "", None, 1, ["token"])]
            changes += [("target", bad) for bad in ("6", None, True, NAN, INF, 0, -1.0, 2**5000)]
        changes += [("memory", bad) for bad in bad_memories(good.get("memory"))]
        for key, bad in changes:
            controller = make()
            state = {**good, key: bad}
            hunt.refuses(lambda c=controller, s=state: c.load_state_dict(s), key, kind, key, bad)
            hunt.equal(controller.state_dict(), good, kind, key, bad)
        # An average of the KL may begin anew; older states have no unit and no target.
        spare = {"unit", "target", *(["memory"] if kind == "all options" else [])}
        needed = [key for key in good if key not in spare]
        for state in (None, [], "state", 1, *(drop(good, key) for key in needed), {**good, "x": 1}):
            controller = make()
            hunt.refuses(lambda c=controller, s=state: c.load_state_dict(s), "state", kind, state)
            hunt.equal(controller.state_dict(), good, kind, state)


def bad_memories(memory):
    """What is no memory of a rule that has one."""
    if memory is None:
        return
    yield from (None, [], 1, "memory", {**memory, "x": 0.0})
    for name in memory:
        yield drop(memory, name)
        yield from ({**memory, name: bad} for bad in ("0", None, True, NAN, INF, [0.0], 2**5000))


def drop(state, key):
    return {name: value for name, value in state.items() if name != key}


def test_one_warning_for_all_that_is_skipped(hunt):
    for (kind, make), bad in itertools.product(controllers().items(), (NAN, INF, -INF, 2**5000)):
        controller = make()
        for count in range(1, 4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                controller.update(bad, 1)
            hunt.equal(len(caught), int(count == 1), kind, bad, count)
            hunt.check(all(w.filename == __file__ for w in caught), kind, bad, count)
