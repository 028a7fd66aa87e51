"""What controllers and watchers read, skip and refuse. Groups, and a user's own controller."""

import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import readme
import torch
from kinds import COEFFICIENTS, READERS, STEERING, WATCHERS, make, stats_of, update, warned

import klfast

pytestmark = pytest.mark.filterwarnings(
    "ignore:mean KL of the last:RuntimeWarning", "ignore:KL is over:RuntimeWarning"
)
every_reader = pytest.mark.parametrize("kind", READERS)
NOT_NUMBERS = (True, "6", None, [6.0], 6j, Decimal(1), torch.ones(2), torch.tensor(True), object())
NOT_FINITE = (math.nan, math.inf, -math.inf, 2**5000, Fraction(-(10**400), 3))
KL_NAMES = ("kl", "k1", "k2", "k3")


def assert_refused(function, error, name, *parts):
    """Check for an error of one line with the argument's name and the parts."""
    with pytest.raises(error, match=name) as caught:
        function()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts)


SCALARS = [
    *(9, np.float32(9), np.int64(9), np.array(9.0), Fraction(9), torch.tensor(9)),
    *(torch.tensor(9.0, dtype=torch.bfloat16), torch.tensor(9.0, requires_grad=True)),
]


@every_reader
def test_any_scalar_means_the_same_and_no_tensor_leaks_in(kind):
    expected = READERS[kind]()
    update(expected, 9.0, 64)
    for current in SCALARS:
        for count in (np.int32(64), torch.tensor(64)):
            reader = READERS[kind]()
            update(reader, current, count)
            assert reader.state_dict() == expected.state_dict()
            json.dumps(reader.state_dict(), allow_nan=False)


@pytest.mark.parametrize("unit", ["sequence", "token"])
@every_reader
def test_unit_picks_the_mean_of_statistics(kind, unit):
    if kind == "fixed":
        return
    stats = stats_of([3.0, 6.0, 0.0], [4.0, 6.0, 0.0])  # the last sequence is empty
    mean = torch.tensor({"sequence": 4.5, "token": 0.9}[unit])
    reader, by_hand = READERS[kind](unit=unit), READERS[kind](unit=unit)
    update(reader, stats, None)
    update(by_hand, mean, 3)
    assert reader.state_dict() == by_hand.state_dict()
    by_default = {"early-stop": "token", "learning-rate": "token", "exponential": "token"}
    assert READERS[kind]().unit == by_default.get(kind, "sequence")


def batch(options=None, *, with_tokens=False):
    """Statistics of a weighted penalty, or of exact divergences, of tokens with positive x."""
    generator = torch.Generator().manual_seed(0)
    if options is None:
        logits = torch.randn(2, 3, 5, 11, generator=generator)
        ids = (logits[0] - logits[1]).argmax(-1) if with_tokens else None
        return klfast.kl_divergence(*logits, token_ids=ids, return_stats=True).stats
    tensors = -2 * torch.rand(3, 4, 6, generator=generator)
    tensors[:2] = tensors[:2].sort(0, descending=True).values  # a negative KL would give a hint
    mask = torch.arange(6) < torch.tensor([[6], [3], [1], [0]])
    estimator = klfast.Estimator("k3", **options)
    return klfast.kl_penalty(
        *(*tensors[:2], mask), estimator=estimator, old_logprobs=tensors[2], return_stats=True
    )[1]


@every_reader
def test_the_sums_that_are_named_are_gone_by(kind):
    stats, states = batch({"importance_cap": 1.5, "kl_clip": 0.2}), set()
    for name in KL_NAMES:
        reader, expected = READERS[kind](), READERS[kind]()
        for _ in range(3):
            update(reader, stats, None, kl=name)
            update(expected, stats._replace(kl=getattr(stats, name)), None)
        assert reader.state_dict() == expected.state_dict()
        states.add(repr(reader.state_dict()))
    assert len(states) == 4 or kind not in ("dual", "monitor")


@every_reader
def test_a_name_that_is_not_there_is_refused(kind):
    reader = READERS[kind]()
    before = reader.state_dict()
    text = "kl must be 'kl' when current is not a KLStats, got 'k1'"
    for current in (9.0, torch.tensor(9.0), math.nan):
        assert_refused(lambda c=current: update(reader, c, 8, kl="k1"), ValueError, text)
    for bad, error in (("k4", ValueError), ("length", ValueError), (None, TypeError)):
        text = r"unknown kl .*'kl', 'k1', 'k2', 'k3'"
        assert_refused(lambda b=bad: update(reader, batch({}), kl=b), error, text)
    assert reader.state_dict() == before
    text = "kl must be 'kl' for statistics of a divergence without token_ids"
    assert_refused(lambda: update(reader, batch(), kl="k1"), ValueError, text)
    assert reader.state_dict() == before
    update(reader, batch(with_tokens=True), kl="k1")
    assert reader.skipped == 0


NO_KL = {
    "nan": math.nan,
    "-inf": -math.inf,
    "beyond float64": -(2**5000),
    "numpy": np.float32(math.nan),
    "tensor": torch.tensor(math.nan),
    "statistics": stats_of([1.0, math.nan], [2.0, 2.0]),
    "no token kept": stats_of([0.0, 0.0], [0.0, 0.0]),
    "no sequence": stats_of([], []),
}
INFINITE = (math.inf, 2**5000, torch.tensor(math.inf), stats_of([math.inf, 1.0], [1.0, 1.0]))


@every_reader
def test_what_is_no_kl_changes_nothing_and_is_warned_of_once(kind):
    for current in (*NO_KL.values(), *(INFINITE if kind in COEFFICIENTS else ())):
        reader = READERS[kind]()
        before = reader.state_dict()
        for count in range(1, 4):
            _, said = warned(update, reader, current)
            assert len(said) == (count == 1)
            assert all("skipped a KL of" in str(each.message) for each in said)
            assert reader.skipped == count
        steps = {"steps": 3} if kind == "learning-rate" else {}
        assert reader.state_dict() == {**before, "skipped": 3, **steps}


def test_the_warning_names_the_line_and_may_be_an_error():
    for kind in READERS:
        reader = READERS[kind]()
        act = reader.step if kind == "learning-rate" else reader.update
        with pytest.warns(RuntimeWarning, match="skipped a KL of nan") as caught:
            act(math.nan)
        assert caught[0].filename == __file__
        reader = READERS[kind]()
        with pytest.raises(RuntimeWarning, match="skipped"):
            update(reader, math.nan)  # a warning is an error here
        assert reader.skipped == 1


@every_reader
def test_a_bad_update_changes_nothing(kind):
    reader = READERS[kind]()
    before = reader.state_dict()
    for bad in (*NOT_NUMBERS, torch.ones(3, 40, 40)):
        if kind != "learning-rate" or bad is not None:
            assert_refused(lambda b=bad: update(reader, b, 8), TypeError, "current must be a numb")
    for bad in (-1, 2**5000, 1.5, 64.0, True, "8", 1j, torch.ones(2), torch.tensor(True)):
        error = ValueError if type(bad) is int else TypeError
        for current in (9.0, math.nan, stats_of([9.0], [3.0])):
            assert_refused(lambda c=current, b=bad: update(reader, c, b), error, "n_steps must be")
    assert reader.state_dict() == before


ABOVE_0, LEAST_0, PART, ABOVE_1 = (0, -1.0), (-1e-300,), (-0.1, 1.0), (1.0, 0.5)
COUNT, COUNT_FROM_0 = (0, -1, 2**5000), (-1, 2**5000)
OF_TARGET = {
    "target min_coef floor": ABOVE_0,
    "max_coef": (0.0, -1.0, 1e-9),
    "init_kl_coef": (-0.1, 0, 9e-8),
    "dead_band": LEAST_0,
    "ema": PART,
}
SETTINGS = {
    "adaptive": {"horizon clip": ABOVE_0},
    "exponential": {"gain": ABOVE_0},
    "nupi": {"ki clip": ABOVE_0, "kp": LEAST_0, "nu": PART, "scale": ("log2", "")},
    "pid-lagrangian": {"ki clip": ABOVE_0, "kp kd": LEAST_0, "p_ema d_ema": PART, "d_delay": COUNT},
    "dual": {"lr clip": ABOVE_0},
    "doubling": {"factor": ABOVE_1, "threshold": (0.99,), "every": COUNT},
    "control-vae": {"kp ki clip": ABOVE_0},
    "scheduled": {
        "shape": ("square",),
        "warmup": COUNT_FROM_0,
        "steps": COUNT,
        "start final": ABOVE_0,
    },
    "schedule": {"init_kl_coef start final": LEAST_0},
    "fixed": {"kl_coef": LEAST_0},
    "monitor": {
        "target": ABOVE_0,
        "window": COUNT,
        "low": LEAST_0,
        "high": (0.5, 0.4),
        "min_updates": (*COUNT, 4),
    },
    "drift": {"limit": ABOVE_0, "window": COUNT, "ahead": COUNT_FROM_0},
    "early-stop": {"target factor": ABOVE_0},
    "reset": {"interval plateau patience": COUNT, "budget": ABOVE_0, "min_delta": LEAST_0},
    "learning-rate": {
        "target": ABOVE_0,
        "factor": ABOVE_1,
        "low": LEAST_0,
        "high": (0.5,),
        "min_lr": (*ABOVE_0, 2e-3),
        "max_lr": (0.0, 1e-4),
    },
}
"""The settings of each controller and watcher, and numbers out of their ranges."""


def test_every_controller_and_watcher_has_its_settings_refused():
    assert SETTINGS.keys() == READERS.keys() - {"nupi-linear"}  # nupi has its settings


MAY_BE_NONE = {
    *("max_coef", "floor", "start", "final", "min_updates"),
    *("interval", "budget", "plateau", "min_lr", "max_lr"),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_bad_settings_are_refused(kind):
    settings = SETTINGS[kind] | (OF_TARGET if kind in STEERING else {})
    for name, out_of_range in ((n, bad) for names, bad in settings.items() for n in names.split()):
        is_count = out_of_range in (COUNT, COUNT_FROM_0) or name == "min_updates"
        is_choice = isinstance(out_of_range[0], str)
        wrong_types = (1, None, ["log"]) if is_choice else NOT_NUMBERS + (1.5,) * is_count
        for bad in wrong_types:
            if not (bad is None and name in MAY_BE_NONE):
                assert_refused(lambda n=name, b=bad: READERS[kind](**{n: b}), TypeError, name)
        for bad in (*out_of_range, *(() if is_choice or is_count else NOT_FINITE)):
            if not (name == "max_coef" and bad == math.inf):
                assert_refused(lambda n=name, b=bad: READERS[kind](**{n: b}), ValueError, name)
    for name, bads in {
        "unit": (("tokens", ValueError), (None, TypeError)),
        "device": (("abacus", ValueError), (1, TypeError)),
        "process_group": (("world", TypeError),),
        "nonsense": ((1, TypeError),),
    }.items():
        taken = not (name == "unit" and kind == "fixed")
        for bad, error in bads if taken else ():
            error = TypeError if name == "device" and kind in WATCHERS else error
            assert_refused(lambda n=name, b=bad: READERS[kind](**{n: b}), error, name)


REFUSED = {
    "1 is above max_coef": (
        lambda: klfast.AdaptiveKLController(1.1, 6.0, max_coef=1.0),
        *(ValueError, "init_kl_coef must be <= max_coef"),
    ),
    "0 without a floor": (
        lambda: klfast.DualKLController(0.0, 6.0),
        *(
            ValueError,
            "init_kl_coef must be .* a controller that multiplies never leaves 0; pass floor=",
        ),
    ),
    "below the floor": (
        lambda: klfast.DualKLController(0.005, 6.0, floor=0.01),
        *(ValueError, r"init_kl_coef must be a finite number >= 0\.01"),
    ),
    "no trigger": (
        lambda: klfast.ReferenceReset(),
        *(ValueError, "one of interval, budget, plateau must be given"),
    ),
    "a rate beside the bounds": (
        lambda: READERS["learning-rate"](min_lr=2e-3, max_lr=1.0),
        *(ValueError, r"around the optimizer's learning rate 0\.001, got 0\.002 and 1"),
    ),
    "an option of another rule": (
        lambda: klfast.get_kl_controller(0.1, 6.0, gain=0.1),
        *(TypeError, "unknown option 'gain'; expected one of 'target', 'horizon', 'clip'"),
    ),
    "an option of a fixed one": (
        lambda: klfast.get_kl_controller(0.1, clip=0.3),
        *(TypeError, "target must be a number when clip is given"),
    ),
}


@pytest.mark.parametrize(("function", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(function, error, text):
    assert_refused(function, error, text)


def test_the_factory_makes_a_fixed_or_an_adaptive_controller():
    for device in (None, "cpu"):
        fixed = klfast.get_kl_controller(0.1, None, 777, device=device)
        assert type(fixed) is klfast.FixedKLController
        assert fixed.update(9.0) == fixed.value == 0.1
        options = {"clip": 0.3, "unit": "token", "min_coef": 1e-3, "max_coef": 2, "device": device}
        adaptive = klfast.get_kl_controller(0.1, 0.2, 500, **options)
        assert repr(adaptive) == repr(klfast.AdaptiveKLController(0.1, 0.2, 500, **options))


@pytest.mark.parametrize("kind", STEERING)
def test_each_group_is_steered_by_its_own_kl_and_target(kind):
    cls, options = STEERING[kind]
    targets = {"chat": 6.0, "maths": 20.0}
    grouped = klfast.GroupedKLController(cls, {"chat": 0.1, "maths": 0.5}, targets, **options)
    alone = {"chat": make(kind, 0.1, 6.0), "maths": make(kind, 0.5, 20.0)}
    for step in range(20):
        kls = {"chat": 8.0 + step, "maths": 8.0 + step}
        if step % 3 == 0:
            del kls["maths"]
        expected = {name: alone[name].update(kl, 64) for name, kl in kls.items()}
        assert {**grouped.update(kls, 64)}.items() >= expected.items()
    assert grouped.value == {name: part.value for name, part in alone.items()} != {**targets}
    assert grouped.skipped == {"chat": 0, "maths": 0}


def test_a_bad_update_of_one_group_changes_none():
    grouped = klfast.GroupedKLController(klfast.AdaptiveKLController, 0.1, {"a": 6.0, "b": 6.0})
    before = grouped.state_dict()
    for arguments, error, text in (
        (({"a": 9.0, "b": "9"}, 8), TypeError, "current must be"),
        (({"a": 9.0, "b": 9.0}, {"a": 8, "b": -8}), ValueError, "n_steps must be"),
        (({"a": 9.0},), TypeError, "n_steps must be given"),
        ((6.0, 8), TypeError, "current must map groups to KLs"),
        (({"c": 6.0}, 8), ValueError, "current must have groups among"),
    ):
        assert_refused(lambda a=arguments: grouped.update(*a), error, text)
    text = "kl must be 'kl' when current is not"
    given = {"a": batch({}), "b": 9.0}
    assert_refused(lambda: grouped.update(given, kl="k1"), ValueError, text)
    assert grouped.state_dict() == before


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((klfast.FixedKLController, 0.1, {"a": 6.0}), TypeError, "controller must be the class"),
        ((klfast.AdaptiveKLController, 0.1, 6.0), TypeError, "targets must map groups to numbers"),
        ((klfast.AdaptiveKLController, 0.1, {"a": -6.0}), ValueError, r"targets\['a'\] must be"),
        ((klfast.AdaptiveKLController, {"b": 0.1}, {"a": 6.0}), ValueError, "must have the groups"),
        ((lambda *_: WithoutState(), 0.5, {"a": 6.0}), TypeError, "must make objects .* got With"),
    ],
)
def test_bad_groups_are_refused(arguments, error, text):
    assert_refused(lambda: klfast.GroupedKLController(*arguments), error, text)


# A user's own controller, which has klfast.KLController's methods and inherits nothing

Halving = readme.run("klfast.controllers.grouped.KLController")["Halving"]
BASE = torch.full((2, 3), -4.0)


class WithoutState:
    value = 0.5

    def update(self, current):
        pass


def test_every_function_takes_a_controller_of_ones_own():
    assert isinstance(Halving(0.5, 6.0), klfast.KLController)
    assert isinstance(klfast.NuPIKLController(0.5, 6.0), klfast.KLController)
    penalty = klfast.KLPenalty(controller=Halving(0.5, 6.0), unit="token")
    loss = penalty(BASE + 0.1, BASE)
    options = {"estimator": "k3+", "reduction": "token-mean"}
    torch.testing.assert_close(loss, klfast.kl_penalty(BASE + 0.1, BASE, coef=0.5, **options))
    assert penalty.step()["kl/coef"] == 0.25
    again = klfast.KLPenalty(controller=Halving(1.0, 6.0))
    again.load_state_dict(json.loads(json.dumps(penalty.state_dict())))
    assert again.coef == 0.25

    rewards = klfast.kl_rewards(torch.ones(2), BASE + 0.1, BASE, kl_coef=Halving(0.25, 6.0))
    assert rewards.equal(klfast.kl_rewards(torch.ones(2), BASE + 0.1, BASE, kl_coef=0.25))

    grouped = klfast.GroupedKLController(Halving, 0.5, {"chat": 6.0, "maths": 1.0})
    _, stats = klfast.kl_penalty(BASE + 2.0, BASE, estimator="k1", return_stats=True)
    assert grouped.update({"chat": stats, "maths": stats}) == {"chat": 0.25, "maths": 0.5}
    again = klfast.GroupedKLController(Halving, 1.0, {"chat": 6.0, "maths": 1.0})
    again.load_state_dict(json.loads(json.dumps(grouped.state_dict())))
    assert again.value == grouped.value
    for given in (WithoutState(), Halving, "0.1", [0.1]):
        text = "controller must be a controller with one coefficient"
        assert_refused(lambda g=given: klfast.KLPenalty(controller=g), TypeError, text)
