"""KLMonitor against exact rational arithmetic."""

import copy
import itertools
import json
import math
import pickle
import sys
import warnings
from decimal import Decimal
from fractions import Fraction

import torch

from klfast import KLMonitor

CATEGORY = "monitor"
NAN, INF = math.nan, math.inf


def exact_status(values, target, low, high):
    """By the mean rounded once to float64, as the band's edges are."""
    mean = Fraction(sum(map(Fraction, values)), len(values))
    mean = float(mean) if abs(mean) <= sys.float_info.max else math.copysign(INF, mean)
    if mean > high * target:
        return "high"
    return "low" if mean < low * target else "ok"


def draws(random):
    """Endless KLs of one kind, by name."""
    return {
        "near": lambda t: t * random.lognormvariate(0, 0.5),
        "edges": lambda t: t * random.choice((0.5, 1.0, 2.0)),
        "beside the edges": lambda t: math.nextafter(
            t * random.choice((0.5, 2.0)), random.choice((0, INF))
        ),
        "cancelling": lambda t: random.choice((1e16, -1e16, t)),
        "tiny": lambda _: random.choice((5e-324, 1e-308, 0.0)),
        "negative": lambda t: -t * random.random(),
        "ints": lambda _: random.randrange(20),
    }


def test_statuses_are_those_of_the_exact_mean(hunt):
    windows, targets, bands = (
        (1, 2, 3, 10, 100),
        (6.0, 0.1, 1e-3),
        ((0.5, 2.0), (0.0, 1.0), (0.9, 1.1)),
    )
    for (what, draw), window, target, (low, high) in itertools.product(
        draws(hunt.random).items(), windows, targets, bands
    ):
        monitor = KLMonitor(target, window=window, low=low, high=high, min_updates=1)
        values, before, warned = [], "ok", 0
        for step in range(60 if hunt.whole else 12):
            values.append(draw(target))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                status = monitor.update(values[-1])
            case = (what, window, target, low, high, step, values[-window:])
            expected = exact_status(values[-window:], target, low, high)
            hunt.equal(status, expected, *case)
            warned = expected not in ("ok", before)
            hunt.equal(len(caught), int(warned), *case, "warnings")
            before = expected


def test_copies_and_states(hunt):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for window in (1, 3, 10):
            monitor = KLMonitor(6.0, window=window)
            for step in range(30):
                monitor.update(hunt.random.lognormvariate(2, 1))
                loaded = KLMonitor(6.0, window=window)
                loaded.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
                pickled = pickle.loads(pickle.dumps(monitor))
                for other in (loaded, pickled, copy.deepcopy(monitor), copy.copy(monitor)):
                    hunt.equal(other.status, monitor.status, window, step)
                    hunt.equal(other.state_dict(), monitor.state_dict(), window, step)
                    value, before = hunt.random.lognormvariate(2, 1), monitor.state_dict()
                    hunt.equal(
                        other.update(value), copy.deepcopy(monitor).update(value), window, step
                    )
                    hunt.equal(monitor.state_dict(), before, window, step, "is another")


def test_what_is_no_kl_is_skipped_and_inf_is_high(hunt):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for above_all in (INF, 2**5000, torch.tensor(INF)):
            monitor = KLMonitor(6.0, window=2)
            for current, status in ((6.0, "ok"), (above_all, "high"), (6.0, "high"), (6.0, "ok")):
                hunt.equal(monitor.update(current), status, above_all)
            hunt.equal(monitor.skipped, 0, above_all)
        for bad in (NAN, -INF, -(2**5000), torch.tensor(NAN)):
            monitor = KLMonitor(6.0, window=2, min_updates=1)
            for count in range(1, 5):
                monitor.update(20.0)
                before = monitor.state_dict()["values"]
                hunt.equal(monitor.update(bad), "high", bad)
                hunt.equal(monitor.state_dict()["values"], before, bad)
                hunt.equal(monitor.skipped, count, bad)


NOT_NUMBERS = ("1", None, True, [1.0], {}, 1j, Decimal(1), object())
NOT_FINITE = (NAN, INF, -INF, 2**5000)


def test_bad_arguments_are_refused(hunt):
    for name, bad in itertools.product(("target", "high", "low"), (*NOT_NUMBERS, *NOT_FINITE, -1)):
        given = {"target": 6.0, name: bad}
        hunt.refuses(lambda g=given: KLMonitor(**g), name, name, bad)
    hunt.refuses(lambda: KLMonitor(0.0), "target")
    for bad in (0, -1, 1.5, 2.0, "3", None, True, NAN, [1], 2**5000):
        hunt.refuses(lambda b=bad: KLMonitor(6.0, window=b), "window", bad)
    for bad in (0, -1, 101, 1.5, 2.0, "3", True, NAN, [1], 2**5000):
        hunt.refuses(lambda b=bad: KLMonitor(6.0, min_updates=b), "min_updates", bad)
    for low, high in ((0.5, 0.5), (2.0, 1.0), (0.5, 0.0)):
        hunt.refuses(lambda x=low, y=high: KLMonitor(6.0, low=x, high=y), "high", low, high)
    for bad in ("", "tokens", None, 1):
        hunt.refuses(lambda b=bad: KLMonitor(6.0, unit=b), "unit", bad)
    for bad in (*NOT_NUMBERS, torch.ones(1), torch.ones(2), torch.tensor(True), torch.tensor(1j)):
        hunt.refuses(lambda b=bad: KLMonitor(6.0).update(b), "current", bad)
    good = KLMonitor(6.0).state_dict()
    changes = [("kind", "fixed"), ("version", 2), ("version", True), ("skipped", -1)]
    changes += [("unit", bad) for bad in ("token", "", None, 1)]
    changes += [("target", bad) for bad in ("6", None, True, NAN, 0, -1.0)]
    changes += [
        ("values", bad) for bad in (None, "1", (1.0,), {}, [NAN], [INF], ["1"], [True], [None])
    ]
    for key, bad in changes:
        monitor = KLMonitor(6.0)
        hunt.refuses(lambda m=monitor, s={**good, key: bad}: m.load_state_dict(s), key, key, bad)
        hunt.equal(monitor.state_dict(), good, key, bad)
