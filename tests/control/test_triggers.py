"""What acts on the KL beside the coefficient: early stop, learning rate, reference reset."""

import math
import random
import warnings

import pytest
import torch

from klfast import KLAdaptiveLR, KLEarlyStop, KLStats, ReferenceReset

BAD_KLS = [math.nan, -math.inf]


def stats(kl, length):
    rest = [torch.zeros(len(kl))] * 6
    return KLStats(torch.tensor(kl), torch.tensor(length), *rest)


def optimizer_of(*rates, as_tensor=False):
    groups = [
        {
            "params": [torch.nn.Parameter(torch.zeros(1))],
            "lr": torch.tensor(rate, dtype=torch.float64) if as_tensor else rate,
        }
        for rate in rates
    ]
    return torch.optim.SGD(groups)


# Early stop


@pytest.mark.parametrize(("kl", "stops"), [(0.0149, False), (0.015, False), (0.0151, True)])
def test_epochs_end_above_1_5_targets(kl, stops):
    stop = KLEarlyStop(0.01)
    assert stop.update(kl) is stops
    assert stop.update(torch.tensor(kl, dtype=torch.float64)) is stops
    assert stop.stops == 2 * stops


def test_early_stop_reads_the_mean_per_token():
    assert KLEarlyStop(1.0).update(stats([9.0, 7.0], [5.0, 5.0]))
    assert not KLEarlyStop(1.0).update(stats([9.0, 5.0], [5.0, 5.0]))
    assert KLEarlyStop(4.0, unit="sequence").update(stats([9.0, 5.0], [5.0, 5.0]))


def test_an_infinite_kl_is_above_every_limit():
    stop, reset = KLEarlyStop(1e300), ReferenceReset(budget=1e300)
    assert stop.update(math.inf)
    assert stop.update(stats([1.0, math.inf], [5.0, 5.0]))
    assert reset.update(math.inf) == "budget"
    scheduler = KLAdaptiveLR(optimizer_of(1e-3), 1e300)
    scheduler.step(math.inf)
    assert scheduler.get_last_lr() == [pytest.approx(1e-3 / 1.5)]
    assert stop.skipped == reset.skipped == scheduler.skipped == 0


@pytest.mark.parametrize("bad", BAD_KLS)
def test_a_bad_kl_does_not_stop(bad):
    stop = KLEarlyStop(1.0)
    with pytest.warns(RuntimeWarning, match="KLEarlyStop skipped"):
        assert not stop.update(bad)
    assert (stop.stops, stop.skipped) == (0, 1)


# Learning rate


def rsl_rl(rate, kl, target, bounds=(1e-5, 1e-2)):
    """The rule of rsl_rl."""
    if kl > target * 2.0:
        return max(bounds[0], rate / 1.5)
    if 0.0 < kl < target / 2.0:
        return min(bounds[1], rate * 1.5)
    return rate


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_the_learning_rate_follows_rsl_rls_rule(as_tensor):
    rng, optimizer = random.Random(0), optimizer_of(1e-3, 5e-3, as_tensor=as_tensor)
    scheduler = KLAdaptiveLR(optimizer, 0.01, min_lr=1e-5, max_lr=1e-2)
    expected = [1e-3, 5e-3]
    places = [group["lr"] for group in optimizer.param_groups]
    for _ in range(200):
        kl = rng.choice([0.0, -0.01, 0.01 * rng.lognormvariate(0, 1.5)])
        scheduler.step(kl)
        expected = [rsl_rl(rate, kl, 0.01) for rate in expected]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        assert rates == expected
        assert scheduler.get_last_lr() == scheduler.last_lr == rates
    if as_tensor:
        assert all(g["lr"] is p for g, p in zip(optimizer.param_groups, places, strict=True))


def test_the_bounds_are_by_default_rsl_rls_in_units_of_its_first_rate():
    rng, optimizer = random.Random(0), optimizer_of(1e-3, 2e-6)
    scheduler, expected = KLAdaptiveLR(optimizer, 0.01), [1e-3, 2e-6]
    bounds = [(1e-5, 1e-2), (2e-6 / 100, 2e-6 * 10)]
    reached = set()
    for kl in [1.0] * 15 + [1e-3] * 30 + [0.01 * rng.lognormvariate(0, 1.5) for _ in range(100)]:
        scheduler.step(kl)
        expected = [rsl_rl(rate, kl, 0.01, own) for rate, own in zip(expected, bounds, strict=True)]
        assert scheduler.last_lr == expected
        reached |= {*expected}
    assert reached >= {*bounds[0], *bounds[1]}


def test_a_rate_that_was_moved_out_of_its_bounds_is_not_moved_the_wrong_way():
    optimizer = optimizer_of(1e-3)
    scheduler = KLAdaptiveLR(optimizer, 0.01)
    optimizer.param_groups[0]["lr"] = 1e-6
    scheduler.step(10.0)
    assert scheduler.last_lr == [1e-6]
    optimizer.param_groups[0]["lr"] = 1.0
    scheduler.step(1e-3)
    assert scheduler.last_lr == [1.0]


def test_a_rate_that_groups_share_is_moved_once():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(3)]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(1e-3, dtype=torch.float64))
    scheduler = KLAdaptiveLR(optimizer, 0.01)
    scheduler.step(10.0)
    assert scheduler.last_lr == [1e-3 / 1.5] * 3


def test_groups_that_are_added_later_have_bounds_of_their_own():
    optimizer = optimizer_of(1e-3)
    scheduler = KLAdaptiveLR(optimizer, 0.01)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1e-5})
    for _ in range(20):
        scheduler.step(10.0)
    assert scheduler.last_lr == [1e-3 / 100, 1e-5 / 100]


def test_it_is_a_scheduler_of_torch():
    optimizer = optimizer_of(1e-3)
    scheduler = KLAdaptiveLR(optimizer, 0.01)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step(stats([9.0], [3.0]))
    assert scheduler.get_last_lr() == [pytest.approx(1e-3 / 1.5)]
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(1e-3 / 1.5)]
    assert scheduler.last_epoch == 2
    assert "target=0.01" in repr(scheduler)


@pytest.mark.parametrize("bad", BAD_KLS)
def test_a_bad_kl_leaves_the_learning_rate(bad):
    scheduler = KLAdaptiveLR(optimizer_of(1e-3), 0.01)
    with pytest.warns(RuntimeWarning, match="KLAdaptiveLR skipped"):
        scheduler.step(bad)
    assert (scheduler.get_last_lr(), scheduler.skipped) == ([1e-3], 1)


# Reference reset


def reasons(reset, kls, metrics=None):
    metrics = metrics or [None] * len(kls)
    return [reset.update(kl, metric) for kl, metric in zip(kls, metrics, strict=True)]


def test_an_interval_counts_from_the_last_reset():
    calls = []
    reset = ReferenceReset(calls.append, interval=3)
    assert reasons(reset, [1.0] * 7) == [None, None, "interval"] * 2 + [None]
    assert (calls, reset.resets) == (["interval"] * 2, 2)


def test_a_budget_must_be_exceeded_in_a_row():
    reset = ReferenceReset(budget=5.0, patience=2)
    kls = [6.0, 5.0, 6.0, 7.0, 6.0, 6.0]
    assert reasons(reset, kls) == [None, None, None, "budget", None, "budget"]


def test_a_plateau_is_of_the_metric_since_the_last_reset():
    reset = ReferenceReset(plateau=2, min_delta=0.1)
    metrics = [1.0, 1.05, 1.2, 1.3, 1.25, 0.1, 0.3, 0.2, None, 0.3]
    expected = [None, None, None, None, "plateau", None, None, None, None, "plateau"]
    assert reasons(reset, [1.0] * 10, metrics) == expected


@pytest.mark.parametrize("bad", [*BAD_KLS, math.inf])
def test_a_metric_that_is_no_number_says_nothing_of_the_plateau(bad):
    reset = ReferenceReset(plateau=2, interval=6)
    metrics = [1.0, bad, 1.0, bad, 1.0, bad]
    assert reasons(reset, [1.0] * 6, metrics) == [None] * 4 + ["plateau", None]


def test_the_first_reason_of_several_is_given_and_all_counts_begin_anew():
    reset = ReferenceReset(interval=4, budget=5.0)
    kls = [1.0, 1.0, 6.0, 1.0, 1.0, 1.0, 6.0]
    assert reasons(reset, kls) == [None, None, "budget", None, None, None, "interval"]


@pytest.mark.parametrize("bad", BAD_KLS)
def test_a_bad_kl_counts_for_nothing(bad):
    reset = ReferenceReset(interval=1)
    with pytest.warns(RuntimeWarning, match="ReferenceReset skipped"):
        assert reset.update(bad) is None
    assert reset.update(1.0) == "interval"


# Settings


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: KLEarlyStop(0.0), "target"),
        (lambda: KLEarlyStop(1.0, factor=-1), "factor"),
        (lambda: KLEarlyStop(1.0, unit="word"), "unit"),
        (lambda: KLAdaptiveLR(optimizer_of(0.1), -1.0), "target"),
        (lambda: KLAdaptiveLR(optimizer_of(0.1), 1.0, factor=1.0), "factor"),
        (lambda: KLAdaptiveLR(optimizer_of(0.1), 1.0, high=0.4), "high"),
        (lambda: KLAdaptiveLR(optimizer_of(0.1), 1.0, min_lr=0.0), "min_lr"),
        (lambda: KLAdaptiveLR(optimizer_of(0.1), 1.0, max_lr=0.01), "max_lr"),
        (lambda: KLAdaptiveLR(optimizer_of(0.1, 1e-6), 1.0, min_lr=1e-5), "1e-06, got 1e-05"),
        (lambda: KLAdaptiveLR(optimizer_of(0.1), 1.0, min_lr=0.01, max_lr=1e-6), "max_lr"),
        (lambda: ReferenceReset(), "interval, budget, plateau"),
        (lambda: ReferenceReset(interval=0), "interval"),
        (lambda: ReferenceReset(budget=0.0), "budget"),
        (lambda: ReferenceReset(plateau=0), "plateau"),
        (lambda: ReferenceReset(budget=1.0, patience=0), "patience"),
        (lambda: ReferenceReset(plateau=1, min_delta=-1.0), "min_delta"),
    ],
)
def test_bad_settings_are_refused(make, named):
    with pytest.raises(ValueError, match=named) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ReferenceReset("policy", interval=1), "callback must be callable"),
        (lambda: ReferenceReset(interval=1.5), "interval must be an integer"),
        (lambda: ReferenceReset(interval=1).update("1"), "current must be a number"),
        (lambda: ReferenceReset(interval=1).update(1.0, "1"), "metric must be a number"),
        (lambda: KLEarlyStop(1.0).update(None), "current must be a number"),
        (lambda: KLEarlyStop(1.0).update(1.0, 1.5), "n_steps must be an integer"),
        (lambda: KLAdaptiveLR(optimizer_of(0.1), 1.0).step("1"), "current must be a number"),
        (lambda: KLEarlyStop(1.0, process_group=1), "process_group must be"),
    ],
)
def test_wrong_types_are_refused(make, named):
    with pytest.raises(TypeError, match=named):
        make()
