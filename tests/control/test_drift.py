"""KLDriftAlarm: over its limit, drifting towards it, whatever the coefficient is."""

import json
import math
import pickle
import random
import warnings

import numpy as np
import pytest
import torch

import klfast
from klfast import KLDriftAlarm


def feed(alarm, values):
    """The statuses returned and the warnings given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        statuses = [alarm.update(value) for value in values]
    assert all(w.category is RuntimeWarning and w.filename == __file__ for w in caught)
    return statuses, [str(w.message) for w in caught]


def test_a_mean_over_the_limit_is_over():
    statuses, said = feed(KLDriftAlarm(6.0, window=2), [5, 7, 7, 5.5, 5])
    assert statuses == ["ok", "ok", "over", "over", "ok"]
    assert said == ["KL is over its limit of 6: 7 nats per sequence over the last 2 updates"]


def test_a_steady_climb_is_said_so_many_updates_ahead():
    """KL = t / 10 passes 6 at t = 60: within 20 updates from t = 41 on."""
    alarm = KLDriftAlarm(6.0, window=10, ahead=20)
    statuses, said = feed(alarm, [t / 10 for t in range(80)])
    assert statuses.index("drifting") == 41
    assert statuses.index("over") == 65  # the mean of ten lags by 4.5
    assert said[0] == (
        "KL is drifting towards its limit of 6: 3.65 nats per sequence over the last 10 updates, "
        "and +0.1 an update"
    )
    assert len(said) == 2


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_no_drift(seed):
    rng = random.Random(seed)
    values = [3.0 * rng.lognormvariate(0, 0.2) for _ in range(500)]
    statuses, _ = feed(KLDriftAlarm(6.0, window=50, ahead=50), values)
    assert statuses.count("drifting") <= 5
    assert "over" not in statuses


def test_a_climb_is_seen_through_noise():
    rng = random.Random(0)
    values = [(1 + t / 50) * rng.lognormvariate(0, 0.2) for t in range(300)]
    statuses, _ = feed(KLDriftAlarm(6.0, window=50, ahead=50), values)
    assert 100 < statuses.index("drifting") < 230
    assert statuses.index("over") > statuses.index("drifting") + 20


def test_the_line_is_that_of_numpy():
    values = [random.Random(1).uniform(0, 9) for _ in range(30)]
    (slope, intercept), covariance = np.polyfit(range(30), values, 1, cov="unscaled")
    rest = np.sum((np.polyval([slope, intercept], range(30)) - values) ** 2) / 28
    found = klfast.controllers.watchers._line(values)
    expected = (slope, math.sqrt(covariance[0, 0] * rest), intercept + 29 * slope)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("options", [{"window": 7}, {"ahead": 0}], ids=str)
def test_a_short_window_or_no_look_ahead_says_over_alone(options):
    statuses, _ = feed(KLDriftAlarm(6.0, **options), [t / 10 for t in range(120)])
    assert set(statuses) == {"ok", "over"}


def test_it_watches_where_the_coefficient_is_0():
    """The penalty is 0 and pulls at nothing, and its statistics still say how far the policy is."""
    alarm = KLDriftAlarm(0.5, window=3, unit="token")
    logprobs = torch.zeros(2, 8, requires_grad=True)
    statuses = []
    for distance in (0.1, 1.0, 2.0):
        loss, stats = klfast.kl_penalty(
            logprobs,
            logprobs.detach() + distance,
            coef=0.0,
            reduction="token-mean",
            return_stats=True,
        )
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert loss == 0
        assert not gradient.any()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statuses.append(alarm.update(stats))
    assert statuses == ["ok", "ok", "over"]


@pytest.mark.parametrize("wild", [-1e160, -1.7e308, 5e-324])
def test_any_finite_kl_can_be_in_the_window(wild):
    alarm = KLDriftAlarm(20.0, window=8)
    for _ in range(10):
        assert alarm.update(wild) == alarm.update(-wild / 2 if wild < 0 else wild) == "ok"


def test_it_goes_on_from_its_state():
    values = [t / 10 for t in range(50)]
    whole, half = KLDriftAlarm(6.0, window=10, ahead=20), KLDriftAlarm(6.0, window=10, ahead=20)
    expected, _ = feed(whole, values)
    feed(half, values[:30])
    resumed = KLDriftAlarm(6.0, window=10, ahead=20)
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    assert feed(pickle.loads(pickle.dumps(resumed)), values[30:])[0] == expected[30:]
    with pytest.raises(ValueError, match=r"state\['kind'\] must be 'monitor', got 'drift'"):
        klfast.KLMonitor(6.0).load_state_dict(half.state_dict())


def test_an_infinite_kl_is_over_every_limit_and_what_is_no_kl_is_skipped():
    alarm = KLDriftAlarm(6.0, window=8)
    statuses, said = feed(alarm, [math.nan, -math.inf, math.inf, *[3.0] * 8])
    assert statuses == ["ok"] * 2 + ["over"] * 8 + ["ok"]
    assert alarm.skipped == 2
    assert len(said) == 2


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"limit": 0}, ValueError, "limit"),
        ({"limit": "6"}, TypeError, "limit"),
        ({"limit": 6.0, "window": 0}, ValueError, "window"),
        ({"limit": 6.0, "ahead": -1}, ValueError, "ahead"),
        ({"limit": 6.0, "ahead": 1.5}, TypeError, "ahead"),
        ({"limit": 6.0, "unit": "batch"}, ValueError, "unit"),
        ({"limit": 6.0, "process_group": 1}, TypeError, "process_group"),
    ],
    ids=str,
)
def test_bad_settings_are_named(settings, error, named):
    with pytest.raises(error, match=named):
        KLDriftAlarm(**settings)
