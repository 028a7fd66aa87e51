"""Estimators and statistics, ``csrc/formulas/estimators.h`` and ``statistics.h``, compiled by
themselves, against mpmath.
"""

import itertools
import math

import mpmath
import oracle
import pytest
import torch

from klfast.estimator import ESTIMATORS
from klfast.stats import KLStats

DTYPES = {"float": torch.float32, "double": torch.float64}
LOG_RATIOS = [0.0, 1e-20, 1e-7, 1e-4, 0.3, math.log(2) / 2, 0.999, 1.0, 1.001, 2.0, 7.5, 80.0]
LOG_RATIOS += [-x for x in LOG_RATIOS[1:]]
TOKENS = list(zip(LOG_RATIOS, itertools.cycle([1.0, 0.5, 3.0]), itertools.cycle([0, 1])))
"""(log-ratio, mask, whether a limit acted)"""


@pytest.fixture(scope="module")
def tokens(compiled):
    """Runs ``tokens.cpp``: a row of numbers for each token, then three of statistics."""
    program = compiled("tokens")

    def run(type_name, given):
        lines = program(type_name, given="".join(f"{x!r} {m!r} {c}\n" for x, m, c in given))
        return [[float.fromhex(word) for word in line.split()] for line in lines]

    return run


def as_stored(x, dtype):
    return torch.tensor(x, dtype=dtype).item()


@pytest.mark.parametrize("type_name", DTYPES)
def test_formulas(tokens, type_name):
    """f, f' and f + f' to the promise on each term, and near x in the loop for near tokens too."""
    dtype = DTYPES[type_name]
    for (given, *_), row in zip(TOKENS, tokens(type_name, TOKENS), strict=False):
        x = mpmath.mpf(as_stored(given, dtype))
        promise, rows = oracle.promise(x, dtype), 2 if abs(x) <= 1 else 1
        assert len(row) == 3 * rows * len(ESTIMATORS)
        numbers = iter(row)
        for name in ESTIMATORS:
            f = oracle.formula(name)
            value, slope = f(x), oracle.slope(f, x)
            for _ in range(rows):
                found = list(itertools.islice(numbers, 3))
                own = (value, slope, value + slope)
                terms = (abs(value), abs(slope), abs(value) + abs(slope))
                for got, truth, size in zip(found, own, terms, strict=True):
                    slack = oracle.STEP + torch.finfo(dtype).tiny
                    assert abs(got - truth) <= promise * size + slack, (name, x)
                if name == "k3":
                    assert found[2] == x


@pytest.mark.parametrize("type_name", DTYPES)
def test_statistics(tokens, type_name):
    dtype = DTYPES[type_name]
    *_, whole, halves, none = tokens(type_name, TOKENS)
    stored = [(mpmath.mpf(as_stored(x, dtype)), m, c) for x, m, c in TOKENS]
    truth = {name: sum(m * oracle.CONTRACT[name](x) for x, m, _ in stored) for name in SUMS}
    truth |= {"kl": sum(3 * x for x, *_ in stored), "length": sum(m for _, m, _ in stored)}
    truth |= {"max_abs_log_ratio": max(abs(x) for x, *_ in stored), "nonfinite": 0}
    truth["clipped"] = sum(c for *_, c in stored)
    largest = {name: max(m * abs(oracle.CONTRACT[name](x)) for x, m, _ in stored) for name in SUMS}
    rounding = len(TOKENS) * torch.finfo(dtype).eps
    for sums in (whole, halves):
        for name, got in zip(KLStats._fields, sums, strict=True):
            size = largest.get(name, 3 * 80)
            exact = name in ("length", "max_abs_log_ratio", "clipped", "nonfinite")
            allowed = 0 if exact else (rounding + oracle.promise(80, dtype)) * size
            assert abs(got - truth[name]) <= allowed, name
    assert none == [0] * len(KLStats._fields)


SUMS = ("k1", "k2", "k3")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("type_name", DTYPES)
def test_what_is_not_finite_is_counted_and_nan_is_the_greatest(tokens, type_name, bad):
    for given in ([(bad, 1.0, 0), (5.0, 1.0, 0)], [(5.0, 1.0, 0), (bad, 1.0, 0)]):
        for sums in tokens(type_name, given)[2:4]:
            found = KLStats(*sums)
            assert found.nonfinite == 1
            assert str(found.max_abs_log_ratio) == str(abs(bad))
