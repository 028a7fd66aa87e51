"""KLMonitor: status of the window's mean, one warning per crossing, bad input, checkpoints."""

import copy
import itertools
import json
import math
import pickle
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from klfast.controllers.target import FixedKLController
from klfast.controllers.watchers import KLMonitor
from klfast.stats.kl import KLStats

finite_floats = st.floats(allow_nan=False, allow_infinity=False)


def feed(monitor: KLMonitor, values) -> tuple[list[str], int]:
    """The statuses returned and the number of warnings given for `values`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        statuses = [monitor.update(value) for value in values]
    return statuses, len(caught)


def kl_stats(kl: list[float], length: list[float]) -> KLStats:
    return KLStats(torch.tensor(kl), torch.tensor(length), *[torch.zeros(len(kl))] * 6)


# Status


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (6, "ok"),
        (12, "ok"),
        (12.001, "high"),
        (1e308, "high"),
        (3, "ok"),
        (2.999, "low"),
        (-1, "low"),
    ],
)
def test_status_compares_the_mean_with_the_band(value, status):
    assert feed(KLMonitor(6.0, min_updates=1), [value]) == ([status], int(status != "ok"))


@settings(deadline=None)
@given(value=st.floats(1e-300, 1e300), window=st.integers(1, 60), n=st.integers(1, 60))
def test_a_constant_kl_at_the_edge_of_the_band_is_ok(value, window, n):
    """The mean of equal values is that value, not a rounding error above it."""
    monitor = KLMonitor(value, window=window, high=1.0, low=0.5, min_updates=1)
    assert feed(monitor, [value] * n) == (["ok"] * n, 0)


@settings(deadline=None)
@given(
    values=st.lists(finite_floats, max_size=40),
    window=st.integers(1, 10),
    target=st.floats(1e-3, 1e3),
)
def test_status_is_that_of_the_exact_mean_of_the_last_window_values(values, window, target):
    statuses, n_warnings = feed(KLMonitor(target, window=window, min_updates=1), values)
    expected = []
    for end in range(1, len(values) + 1):
        last = values[max(0, end - window) : end]
        mean = float(sum(map(Fraction, last)) / len(last))
        expected.append("high" if mean > 2 * target else "low" if mean < target / 2 else "ok")
    assert statuses == expected
    crossings = zip(["ok", *expected], expected, strict=False)
    assert n_warnings == sum(now != "ok" and now != before for before, now in crossings)


def test_one_warning_per_crossing():
    monitor = KLMonitor(6.0, window=1)
    assert feed(monitor, [6, 20, 20, 20]) == (["ok", "high", "high", "high"], 1)
    assert feed(monitor, [6, 6]) == (["ok", "ok"], 0)  # coming back is no alarm
    assert feed(monitor, [20, 1, 1, 20]) == (["high", "low", "low", "high"], 3)
    assert monitor.status == "high"


def test_the_warning_says_what_is_wrong_and_where():
    said = r"high: 20 nats per token, target 6; raise the coefficient or lower the learning rate"
    with pytest.warns(RuntimeWarning, match=said) as caught:
        KLMonitor(6.0, unit="token", window=1).update(20.0)
    assert caught[0].filename == __file__
    said = r"low: 1 nats per sequence, target 6; lower the coefficient"
    with pytest.warns(RuntimeWarning, match=said):
        KLMonitor(6.0, window=1).update(1.0)


@pytest.mark.parametrize(
    ("options", "first"),
    [({}, 20), ({"window": 7}, 7), ({"min_updates": 1}, 1), ({"min_updates": 100}, 100)],
    ids=str,
)
def test_it_says_nothing_before_min_updates_values(options, first):
    """The policy begins as its reference, at a KL of 0."""
    monitor = KLMonitor(6.0, **options)
    statuses, n_warnings = feed(monitor, [0.0] * (first - 1))
    assert (statuses, n_warnings, monitor.status) == (["ok"] * (first - 1), 0, "ok")
    assert feed(monitor, [math.nan]) == (["ok"], 1)  # which is no value
    assert feed(monitor, [0.0, 0.0]) == (["low", "low"], 1)


def test_a_state_with_enough_values_is_judged_at_once():
    source = KLMonitor(6.0)
    feed(source, [30.0] * 25)
    resumed = KLMonitor(6.0)
    resumed.load_state_dict(source.state_dict())
    assert resumed.status == "high"
    patient = KLMonitor(6.0, min_updates=50)
    patient.load_state_dict(source.state_dict())
    assert patient.status == "ok"


@pytest.mark.parametrize("bad", [0, -1, 101])
def test_min_updates_out_of_range(bad):
    with pytest.raises(ValueError, match="min_updates must be"):
        KLMonitor(6.0, min_updates=bad)
    with pytest.raises(ValueError, match="min_updates must be <= window=10, got 20"):
        KLMonitor(6.0, window=10, min_updates=20)


def test_state_is_consistent_when_the_warning_is_an_error():
    monitor = KLMonitor(6.0, min_updates=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            monitor.update(20.0)
        assert monitor.update(20.0) == "high"
    assert monitor.state_dict()["values"] == [20.0, 20.0]


def test_an_early_window_uses_what_it_has():
    monitor = KLMonitor(6.0, window=4, min_updates=1)
    assert monitor.status == KLMonitor(6.0, high=0.6).status == "ok"
    assert feed(monitor, [30, 2, 2, 2])[0] == ["high", "high", "ok", "ok"]
    assert feed(monitor, [2]) == (["low"], 1)  # the 30 has left the window


# What is read


@pytest.mark.parametrize(
    "current",
    [13, 13.0, np.float32(13), torch.tensor(13.0), torch.tensor(13.0, dtype=torch.float16)],
)
def test_any_scalar_means_the_same(current):
    monitor = KLMonitor(6.0, min_updates=1)
    assert feed(monitor, [current]) == (["high"], 1)
    assert [repr(value) for value in monitor.state_dict()["values"]] == ["13.0"]


@pytest.mark.parametrize(("unit", "mean"), [("sequence", 4.5), ("token", 0.9)])
def test_unit_picks_the_mean_of_stats(unit, mean):
    monitor = KLMonitor(mean, unit=unit, min_updates=1)
    assert monitor.update(kl_stats([3.0, 6.0, 0.0], [4.0, 6.0, 0.0])) == "ok"
    assert monitor.state_dict()["values"] == [pytest.approx(mean, rel=1e-6)]
    assert KLMonitor(6.0).unit == "sequence"


@pytest.mark.parametrize(
    "bad",
    [math.nan, -math.inf, torch.tensor(math.nan), kl_stats([0.0], [0.0])],
    ids=["nan", "-inf", "nan-tensor", "empty-stats"],
)
def test_what_is_no_kl_changes_nothing_and_warns_once(bad):
    monitor = KLMonitor(6.0, min_updates=1)
    feed(monitor, [20.0])
    assert feed(monitor, [bad, bad, bad]) == (["high"] * 3, 1)
    assert monitor.skipped == 3
    assert monitor.state_dict()["values"] == [20.0]


@pytest.mark.parametrize("above_all", [math.inf, 10**400, kl_stats([math.inf, 1.0], [1.0, 1.0])])
def test_an_infinite_kl_is_high_until_it_has_left_the_window(above_all):
    monitor = KLMonitor(6.0, window=3)
    assert feed(monitor, [6.0, above_all, 6.0, 6.0, 6.0]) == (["ok", *["high"] * 3, "ok"], 1)
    assert monitor.skipped == 0


@pytest.mark.parametrize("bad", [True, "6", None, [6.0], torch.ones(2)], ids=repr)
def test_current_must_be_a_number(bad):
    monitor = KLMonitor(6.0)
    with pytest.raises(TypeError, match="current must be"):
        monitor.update(bad)
    assert monitor.state_dict() == KLMonitor(6.0).state_dict()


# Settings


@pytest.mark.parametrize(
    ("setting", "bad"),
    [
        *[("target", bad) for bad in (0, -1.0, math.nan, math.inf)],
        *[("window", bad) for bad in (0, -1)],
        *[("high", bad) for bad in (0.5, 0.4, -1, math.nan, math.inf)],
        *[("low", bad) for bad in (-0.1, math.nan, math.inf)],
    ],
)
def test_settings_out_of_range(setting, bad):
    with pytest.raises(ValueError, match=f"{setting} must be"):
        KLMonitor(**{"target": 6.0, setting: bad})


WRONG_TYPES = (True, "6", None, [6.0])


@pytest.mark.parametrize(
    ("setting", "bad"),
    [
        *itertools.product(("target", "window", "high", "low"), WRONG_TYPES),
        *(("min_updates", bad) for bad in WRONG_TYPES if bad is not None),
    ],
)
def test_settings_of_wrong_type(setting, bad):
    with pytest.raises(TypeError, match=f"{setting} must be"):
        KLMonitor(**{"target": 6.0, setting: bad})


def test_window_must_be_an_integer():
    with pytest.raises(TypeError, match="window must be an integer"):
        KLMonitor(6.0, window=100.0)


def test_unknown_unit_lists_the_right_ones():
    with pytest.raises(ValueError, match=r"'tokens'.*'sequence', 'token'"):
        KLMonitor(6.0, unit="tokens")


# Checkpoints


@pytest.mark.parametrize(
    "carry_over",
    [
        lambda monitor, fresh: (
            fresh.load_state_dict(json.loads(json.dumps(monitor.state_dict(), allow_nan=False)))
            or fresh
        ),
        lambda monitor, fresh: copy.deepcopy(monitor),
        lambda monitor, fresh: pickle.loads(pickle.dumps(monitor)),
    ],
    ids=["json", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("n", [0, 3, 50])
def test_a_resumed_run_continues_exactly(carry_over, n):
    rng = random.Random(n)
    values = [rng.lognormvariate(2.0, 1.0) for _ in range(n + 100)]
    monitor = KLMonitor(6.0, window=10)
    feed(monitor, [math.nan, *values[:n], *[math.inf] * (n == 3)])
    resumed = carry_over(monitor, KLMonitor(6.0, window=10))
    assert (resumed.status, resumed.skipped) == (monitor.status, 1)
    before = monitor.state_dict()
    continued = feed(resumed, values[n:])
    assert monitor.state_dict() == before  # the two share nothing
    assert continued == feed(monitor, values[n:])


def test_loading_follows_the_settings_of_the_object_without_a_warning():
    source = KLMonitor(6.0, min_updates=1)
    feed(source, [6.0, 6.0, 30.0, 30.0])
    narrow = KLMonitor(10.0, window=2)
    narrow.load_state_dict(source.state_dict())
    assert (narrow.status, narrow.state_dict()["values"]) == ("high", [30.0, 30.0])
    assert feed(narrow, [30.0]) == (["high"], 0)


@pytest.mark.parametrize(
    ("change", "error_type", "named"),
    [
        ({"kind": "fixed"}, ValueError, "kind"),
        ({"version": 2}, ValueError, "version"),
        ({"values": [6.0, math.nan]}, ValueError, "values"),
        ({"values": [6.0, "nan"]}, TypeError, "values"),
        ({"values": [6.0, math.inf]}, ValueError, "values"),
        ({"values": [6.0, "6"]}, TypeError, "values"),
        ({"values": 6.0}, TypeError, "values"),
        ({"values": None}, TypeError, "values"),
        ({"skipped": -1}, ValueError, "skipped"),
        ({"more": 1}, ValueError, "keys"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_whole(change, error_type, named):
    monitor = KLMonitor(6.0)
    before = monitor.state_dict()
    with pytest.raises(error_type, match=named):
        monitor.load_state_dict({**before, "values": [30.0], "skipped": 5, **change})
    assert (monitor.state_dict(), monitor.status) == (before, "ok")


def test_states_of_controllers_and_missing_keys_are_refused():
    with pytest.raises(ValueError, match=r"'monitor'.*'fixed'"):
        KLMonitor(6.0).load_state_dict(FixedKLController(0.1).state_dict())
    for key in KLMonitor(6.0).state_dict().keys() - {"unit", "target"}:  # which older states lack
        state = KLMonitor(6.0).state_dict()
        del state[key]
        with pytest.raises(ValueError, match=key):
            KLMonitor(6.0).load_state_dict(state)


def test_repr_shows_status_and_settings():
    fields = "status='ok', unit='sequence', target=6.0, window=100, low=0.5, high=2.0"
    assert repr(KLMonitor(6.0)) == f"KLMonitor({fields}, min_updates=20, skipped=0)"
