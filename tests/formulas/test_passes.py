"""``csrc/formulas/passes.h``, which decides when a row of logits is summed again, and ``fit.h``."""

import mpmath
import pytest
from mpmath import mpf

STEPS = ("find-first", "sum-first", "find-in-row", "sum-from-row", "sum-again", "done")
VERDICTS = ("useless", "poor", "good")
OVER_THE_ROW = {"sum-first", "find-in-row", "sum-from-row", "sum-again"}

VERDICTS_ON_ONE = {
    "nan": "useless",
    "inf": "useless",
    "0": "useless",
    "1e-20": "useless",
    "1.1e-20": "poor",
    "1e-2": "poor",
    "1.1e-2": "good",
    "1": "good",
    "9.9e6": "good",
    "1e7": "poor",
    "9.9e29": "poor",
    "1e30": "useless",
}
"""The sum of e^(x - m) of a row -> the verdict."""

VERDICTS_ON_TWO = {
    "1,1,0": "good",
    "1,1,1": "poor",
    "1,0.125,0": "poor",
    "1,0.126,0": "good",
    "1,9.9e3,0": "good",
    "1,1e4,0": "poor",
    "1e8,1,0": "poor",
    "1e8,1e8,0": "poor",
    "100,10,0": "poor",
    "100,100,0": "good",
    "1e20,1e29,0": "poor",
    "1e20,8.5e37,0": "useless",  # 2**126, which is exp's limit on some instruction sets
    "1e20,1.7e38,0": "useless",  # e**88
    "1e-15,1e-21,0": "useless",
    "1,1e-20,0": "useless",
    "1,1e30,0": "useless",
    "1,nan,0": "useless",
    "nan,1,0": "useless",
    "1e-20,1,1": "useless",
}
"""The sums of two models, and 1 if their KL has lost digits -> the verdict."""


@pytest.fixture(scope="module")
def program(compiled):
    return compiled("passes")


@pytest.fixture(scope="module")
def next_step(program):
    """(step, verdict) -> the next step."""
    rules = [line.split() for line in program()[: len(STEPS) * len(VERDICTS)]]
    table = {(step, verdict): after for step, verdict, after in rules}
    assert set(table) == {(step, verdict) for step in STEPS for verdict in VERDICTS}
    return table


@pytest.fixture(scope="module")
def roads(next_step):
    """Every sequence of (step, verdict) pairs that a row may have."""

    def follow(step, road):
        assert len(road) < 10, f"a road without end: {road}"
        if step == "done":
            yield road
            return
        for verdict in VERDICTS:
            yield from follow(next_step[step, verdict], [*road, (step, verdict)])

    return list(follow("find-first", []))


def test_a_row_takes_one_pass_if_its_first_guess_is_good(next_step):
    assert next_step["find-first", "good"] == "sum-first"
    assert next_step["sum-first", "good"] == "done"


def test_a_row_takes_at_most_four_passes(roads):
    passes = [sum(step in OVER_THE_ROW for step, _ in road) for road in roads]
    assert max(passes) == 4


@pytest.mark.parametrize("cases", [VERDICTS_ON_ONE, VERDICTS_ON_TWO], ids=["one", "two"])
def test_verdicts(program, cases):
    verdicts = program(*cases)[len(STEPS) * len(VERDICTS) :]
    assert dict(zip(cases, verdicts, strict=True)) == cases


WEIGHTS = ("1e-20", "1e-6", "1e-4", "1e-3", "0.01", "0.1", "0.25", "0.3", "0.4", "0.5")
WEIGHTS += tuple(str(1 - float(weight)) for weight in WEIGHTS[2:-1])
FLOAT_ERROR = 1.7e-7
"""Relative: 4e-8 for the fit, and about two roundings for Horner's rule in float."""
STEEP_ERROR = 1.3e-6  # for a skewed KL with a above 1/2. Near a = 1 its slopes grow like e^2u.


@pytest.fixture(scope="module")
def fitted(compiled):
    """Name, weight -> (u in bits, the three polynomials) at every u of the grid."""
    # Each step fuses, as on a device.
    program = compiled("fit", "-O1", "-ffp-contract=off", "-DKLFAST_EMULATE_CUDA")

    def run(name, weight):
        for line in program(name, weight):
            bits, *found = (mpf(float.fromhex(word)) for word in line.split())
            yield bits, found

    return run


def jsd(u, b):
    """A term of the JSD over p, log(m / p) and log(q / m), for a log-ratio of u nats."""
    log_m = mpmath.log((1 - b) + b * mpmath.exp(u))
    return b * mpmath.exp(u) * (u - log_m) - (1 - b) * log_m, log_m, u - log_m


def skew(u, a):
    """A term of a skewed KL over p, and the slopes (-1, 1 / (1 - a)) times those in p and q."""
    m = a + (1 - a) * mpmath.exp(u)
    log_m = mpmath.log(m)
    return m - 1 - log_m, log_m + a * (1 / m - 1), 1 - 1 / m


LIMITS = {
    jsd: lambda b: (b * (1 - b) / 2, b, 1 - b),
    skew: lambda a: ((1 - a) ** 2 / 2, (1 - a) ** 2, 1 - a),
}
"""The terms over u^2, u and u at 0."""


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("terms", LIMITS)
def test_the_terms_of_near_words(fitted, terms, weight):
    with mpmath.workdps(80):
        worst, w, points = 0, mpf(float(weight)), list(fitted(terms.__name__, weight))
        assert len(points) == 401
        for bits, found in points:
            u = bits * mpmath.log(2)
            powers = bits**2, bits, bits
            truth = (
                [x / of for x, of in zip(terms(u, w), powers, strict=True)]
                if bits
                else [
                    limit * mpmath.log(2) ** n
                    for n, limit in zip((2, 1, 1), LIMITS[terms](w), strict=True)
                ]
            )
            worst = max(worst, *(abs(x / of - 1) for x, of in zip(found, truth, strict=True)))
        is_steep = terms is skew and w > 0.5
        assert worst <= (STEEP_ERROR if is_steep else FLOAT_ERROR)
