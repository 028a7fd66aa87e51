"""The watchers: monitor, drift alarm, early stop, learning rate, reset of the reference."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import READERS, optimizer_of, stats_of, warned

import klfast


def feed(watcher, values):
    """The statuses returned and the warnings given."""
    statuses, caught = warned(lambda: [watcher.update(value) for value in values])
    assert all(each.filename == __file__ for each in caught)
    return statuses, [str(each.message) for each in caught]


@given(
    values=st.lists(
        st.floats(allow_nan=False, allow_infinity=False)
        | st.sampled_from([0.5, 1.0, 2.0, 5e-324, 1e16, -1e16, 1e308])
        | st.sampled_from([0.5, 2.0]).map(lambda edge: math.nextafter(edge, math.inf)),
        max_size=40,
    ),
    window=st.integers(1, 10),
    target=st.sampled_from([1.0, 6.0, 0.1]),
    band=st.sampled_from([(0.5, 2.0), (0.0, 1.0), (0.9, 1.1)]),
)
def test_status_is_that_of_the_exact_mean_of_the_last_values(values, window, target, band):
    low, high = band
    monitor = klfast.KLMonitor(target, window=window, low=low, high=high, min_updates=1)
    values = [target * value if abs(value) <= 2 else value for value in values]
    statuses, said = feed(monitor, values)
    expected = []
    for end in range(1, len(values) + 1):
        last = values[max(0, end - window) : end]
        mean = float(sum(map(Fraction, last)) / len(last))
        expected.append("high" if mean > high * target else "low" if mean < low * target else "ok")
    assert statuses == expected
    crossings = zip(["ok", *expected], expected, strict=False)
    assert len(said) == sum(now != "ok" and now != before for before, now in crossings)


def test_one_warning_per_crossing_says_what_is_wrong_and_where():
    monitor = klfast.KLMonitor(6.0, window=1)
    high = "high: 20 nats per sequence, target 6; raise the coefficient or lower the learning rate"
    low = "low: 1 nats per sequence, target 6; lower the coefficient"
    for values, statuses, parts in (
        ([6, 20, 20, 20], ["ok", "high", "high", "high"], [high]),
        ([6, 6], ["ok", "ok"], []),  # coming back is no alarm
        ([20, 1, 1, 20], ["high", "low", "low", "high"], [high, low, high]),
    ):
        found, said = feed(monitor, values)
        assert found == statuses
        assert [part in text for part, text in zip(parts, said, strict=True)] == [True] * len(parts)
    assert monitor.status == "high"
    fields = "status='high', unit='sequence', target=6.0, window=1, low=0.5, high=2.0"
    assert repr(monitor) == f"KLMonitor({fields}, min_updates=1, skipped=0)"


@pytest.mark.parametrize(
    ("options", "first"),
    [({}, 20), ({"window": 7}, 7), ({"min_updates": 1}, 1), ({"min_updates": 100}, 100)],
    ids=str,
)
def test_it_says_nothing_before_min_updates_values(options, first):
    """The policy equals its reference at first, so the KL begins at 0."""
    monitor = klfast.KLMonitor(6.0, **options)
    assert feed(monitor, [0.0] * (first - 1)) == (["ok"] * (first - 1), [])
    statuses, said = feed(monitor, [math.nan])  # NaN is not counted
    assert (statuses, len(said)) == (["ok"], 1)
    statuses, said = feed(monitor, [0.0, 0.0])
    assert (statuses, len(said)) == (["low", "low"], 1)


@pytest.mark.parametrize(
    "above_all", [math.inf, 10**400, stats_of([math.inf, 1.0], [1.0, 1.0])], ids=type
)
def test_an_infinite_kl_is_above_every_limit_until_it_has_left_the_window(above_all):
    statuses, said = feed(klfast.KLMonitor(6.0, window=3), [6.0, above_all, 6.0, 6.0, 6.0])
    assert (statuses, len(said)) == (["ok", *["high"] * 3, "ok"], 1)
    alarm = klfast.KLDriftAlarm(6.0, window=8)
    statuses, said = feed(alarm, [math.nan, -math.inf, above_all, *[3.0] * 8])
    assert (statuses, len(said)) == (["ok"] * 2 + ["over"] * 8 + ["ok"], 2)
    stop, reset = klfast.KLEarlyStop(1e300), klfast.ReferenceReset(budget=1e300)
    assert stop.update(above_all)
    assert reset.update(above_all) == "budget"
    scheduler = klfast.KLAdaptiveLR(optimizer_of(1e-3), 1e300)
    scheduler.step(above_all)
    assert scheduler.last_lr == [pytest.approx(1e-3 / 1.5)]
    assert stop.skipped == reset.skipped == scheduler.skipped == 0
    assert alarm.skipped == 2


def test_a_mean_over_the_limit_is_over():
    statuses, said = feed(klfast.KLDriftAlarm(6.0, window=2), [5, 7, 7, 5.5, 5])
    assert statuses == ["ok", "ok", "over", "over", "ok"]
    assert said == ["KL is over its limit of 6: 7 nats per sequence over the last 2 updates"]


def test_a_steady_climb_is_said_so_many_updates_ahead():
    """KL = t / 10 passes 6 at t = 60. The alarm sees it 20 updates ahead, from t = 41 on."""
    climb = [t / 10 for t in range(80)]
    statuses, said = feed(klfast.KLDriftAlarm(6.0, window=10, ahead=20), climb)
    assert statuses.index("drifting") == 41
    assert statuses.index("over") == 65  # the mean of ten values lags by 4.5
    assert said[0] == (
        "KL is drifting towards its limit of 6: 3.65 nats per sequence over the last 10 updates, "
        "and +0.1 an update"
    )
    assert len(said) == 2
    for options in ({"window": 7}, {"ahead": 0}):  # a window too short for a line, or no look ahead
        statuses, _ = feed(klfast.KLDriftAlarm(6.0, **options), [*climb, *[8.0] * 50])
        assert {*statuses} == {"ok", "over"}


def test_epochs_end_above_1_5_targets():
    stop = klfast.KLEarlyStop(0.01)
    kls = (0.0149, 0.015, 0.0151, torch.tensor(0.0151, dtype=torch.float64))
    assert [stop.update(kl) for kl in kls] == [False, False, True, True]
    assert stop.stops == 2
    assert warned(stop.update, math.nan)[0] is False


@pytest.fixture(scope="module")
def drift():
    """Statistics by estimator of an older policy's tokens by their shares, and KL(old || new)."""
    old, new = torch.randn(2, 6, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    options = {"mask": old.exp()[None], "return_stats": True}
    names = ("k1", "k2", "k3", "k3_ref")
    found = {n: klfast.kl_penalty(new[None], old[None], estimator=n, **options)[1] for n in names}
    return found, (old.exp() * (old - new)).sum().item()


WATCHERS = {
    "stop": klfast.KLEarlyStop,
    "rate": lambda target: klfast.KLAdaptiveLR(optimizer_of(0.1), target),
    "monitor": lambda target: klfast.KLMonitor(target, window=3),
    "alarm": lambda limit: klfast.KLDriftAlarm(limit, window=3),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_statistics_of_an_older_policys_tokens_fit_one_estimator(watcher, drift):
    """k3_ref measures their KL. k1 is its negative, below every limit, and gives a hint."""
    stats, kl = drift
    assert stats["k3_ref"].token_mean().item() == pytest.approx(kl, rel=1e-5)
    assert stats["k1"].token_mean().item() == pytest.approx(-kl, rel=1e-5)
    for current, is_hinted in [(-kl, False), *((of, name == "k1") for name, of in stats.items())]:
        reader = WATCHERS[watcher](kl / 10)
        update = reader.step if watcher == "rate" else reader.update
        said, caught = warned(lambda update=update, of=current: [update(of) for _ in range(4)])
        assert sum("k3_ref" in str(each.message) for each in caught) == is_hinted
        assert (
            watcher != "stop" or said == [isinstance(current, klfast.KLStats) and not is_hinted] * 4
        )


def rsl_rl(rate, kl, target, bounds):
    """The rule of rsl_rl, which KLAdaptiveLR follows."""
    if kl > target * 2.0:
        return max(bounds[0], rate / 1.5)
    if 0.0 < kl < target / 2.0:
        return min(bounds[1], rate * 1.5)
    return rate


@pytest.mark.parametrize("options", [{}, {"min_lr": 1e-5, "max_lr": 1e-2}], ids=["own", "given"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_the_learning_rate_follows_rsl_rls_rule(as_tensor, options):
    """The default bounds are rsl_rl's, in units of each group's first rate."""
    rng, expected = random.Random(0), [1e-3, 5e-5]
    rates = [torch.tensor(lr, dtype=torch.float64) for lr in expected] if as_tensor else expected
    optimizer = optimizer_of(*rates)
    scheduler, reached = klfast.KLAdaptiveLR(optimizer, 0.01, **options), set()
    bounds = [(1e-5, 1e-2)] * 2 if options else [(lr / 100, lr * 10) for lr in expected]
    kls = [rng.choice([0.0, -0.01, 0.01 * rng.lognormvariate(0, 1.5)]) for _ in range(100)]
    for kl in [1.0] * 15 + [1e-3] * 30 + kls:
        scheduler.step(kl)
        expected = [rsl_rl(lr, kl, 0.01, own) for lr, own in zip(expected, bounds, strict=True)]
        found = [float(group["lr"]) for group in optimizer.param_groups]
        assert found == scheduler.get_last_lr() == scheduler.last_lr == expected
        reached |= {*expected}
    assert reached >= {*bounds[0], *bounds[1]}
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        assert not as_tensor or group["lr"] is rate


def test_a_rate_that_was_moved_out_of_its_bounds_is_not_moved_the_wrong_way():
    optimizer = optimizer_of(1e-3)
    scheduler = klfast.KLAdaptiveLR(optimizer, 0.01)
    for rate, kl in ((1e-6, 10.0), (1.0, 1e-3)):
        optimizer.param_groups[0]["lr"] = rate
        scheduler.step(kl)
        assert scheduler.last_lr == [rate]


def test_it_is_a_scheduler_of_torch():
    optimizer = optimizer_of(1e-3)
    scheduler = klfast.KLAdaptiveLR(optimizer, 0.01)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    optimizer.step()
    scheduler.step(stats_of([9.0], [3.0]))
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(1e-3 / 1.5)]
    assert scheduler.last_epoch == 2
    assert "target=0.01" in repr(scheduler)


@pytest.mark.parametrize(
    ("options", "kls", "metrics", "expected"),
    [
        ({"interval": 3}, [1.0] * 7, None, [0, 0, "interval"] * 2 + [0]),
        (
            *({"budget": 5.0, "patience": 2}, [6.0, 5.0, 6.0, 7.0, 6.0, 6.0], None),
            [0, 0, 0, "budget", 0, "budget"],
        ),
        (
            *({"plateau": 2, "min_delta": 0.1}, [1.0] * 10),
            [1.0, 1.05, 1.2, 1.3, 1.25, 0.1, 0.3, 0.2, None, 0.3],
            [0, 0, 0, 0, "plateau", 0, 0, 0, 0, "plateau"],
        ),
        *(
            (
                *({"plateau": 2, "interval": 6}, [1.0] * 6, [1.0, bad, 1.0, bad, 1.0, bad]),
                [0] * 4 + ["plateau", 0],
            )
            for bad in (math.nan, math.inf, -math.inf)
        ),
        (
            *({"interval": 4, "budget": 5.0}, [1.0, 1.0, 6.0, 1.0, 1.0, 1.0, 6.0], None),
            [0, 0, "budget", 0, 0, 0, "interval"],  # all counts begin anew
        ),
    ],
    ids=["interval", "budget", "plateau", "nan", "inf", "-inf", "several"],
)
def test_a_reset_is_due(options, kls, metrics, expected):
    calls = []
    reset = klfast.ReferenceReset(calls.append, **options)
    pairs = zip(kls, metrics or [None] * len(kls), strict=True)
    assert [reset.update(kl, metric) or 0 for kl, metric in pairs] == expected
    assert calls == [reason for reason in expected if reason]
    assert reset.resets == len(calls)
    assert warned(reset.update, math.nan)[0] is None
    assert "resets=" in repr(READERS["reset"]())
