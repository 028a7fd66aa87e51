"""``csrc/formulas/estimators.h`` and ``statistics.h``, compared with mpmath."""

import itertools
import math

import mpmath
import oracle
import pytest
import torch

from klfast import Estimator
from klfast.args.estimator import ESTIMATORS
from klfast.stats.kl import KLStats

DTYPES = {"float": torch.float32, "double": torch.float64}
LOG_RATIOS = [0.0, 1e-20, 1e-7, 1e-4, 0.3, math.log(2) / 2, 0.999, 1.0, 1.001, 2.0, 7.5, 80.0]
LOG_RATIOS += [-x for x in LOG_RATIOS[1:]]
MASK = [1.0, 0.5, 3.0]  # in turns
CLIPPED = Estimator("k1", kl_clip=2.0)


@pytest.fixture(scope="module")
def tokens(compiled):
    """Runs ``tokens.cpp``: a row of numbers for each token, then three of statistics."""
    program = compiled("tokens")

    def run(type_name, log_ratios):
        given = ""
        for x, weight in zip(log_ratios, itertools.cycle(MASK)):
            value = weight * (x if abs(x) <= 2 else math.copysign(2, x))
            given += f"{x!r} {weight!r} {value!r} {int(abs(x) > 2)}\n"
        lines = program(type_name, given=given)
        return [[float.fromhex(word) for word in line.split()] for line in lines]

    return run


@pytest.mark.parametrize("type_name", DTYPES)
def test_formulas(tokens, type_name):
    """f, f' and f + f' have the promised error per term. Near tokens have a second loop."""
    dtype = DTYPES[type_name]
    for given, row in zip(LOG_RATIOS, tokens(type_name, LOG_RATIOS), strict=False):
        x = mpmath.mpf(torch.tensor(given, dtype=dtype).item())
        promise, rows = oracle.promise(x, dtype), 2 if abs(x) <= 1 else 1
        assert len(row) == 3 * rows * len(ESTIMATORS)
        numbers = iter(row)
        for name in ESTIMATORS:
            f = oracle.CONTRACT[name]
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
    """The statistics of ``CLIPPED``, of all tokens together and in two parts."""
    x = torch.tensor(LOG_RATIOS, dtype=DTYPES[type_name])
    mask = torch.tensor(MASK).repeat(len(x))[: len(x)]
    truth = oracle.kl_penalty(x, torch.zeros_like(x), mask, estimator=CLIPPED)
    *_, whole, halves, none = tokens(type_name, LOG_RATIOS)
    for sums in (whole, halves):
        for name, found in zip(KLStats._fields, sums, strict=True):
            found = torch.tensor([found], dtype=DTYPES[type_name])
            # A running sum has three more roundings per term than the oracle allows.
            allowed = 3 * truth.stats_tolerance[name]
            oracle.assert_within(found, truth.stats[name], allowed, name)
    assert none == [0] * len(KLStats._fields)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("type_name", DTYPES)
def test_what_is_not_finite_is_counted_and_nan_is_the_greatest(tokens, type_name, bad):
    for log_ratios in ([bad, 5.0], [5.0, bad]):
        for sums in tokens(type_name, log_ratios)[2:4]:
            found = KLStats(*sums)
            assert found.nonfinite == 1
            assert str(found.max_abs_log_ratio) == str(abs(bad))
