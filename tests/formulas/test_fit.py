"""The polynomials of near terms in ``csrc/formulas/fit.h``, compared with mpmath."""

import mpmath
import pytest
from mpmath import mpf

WEIGHTS = ("1e-20", "1e-6", "1e-4", "1e-3", "0.01", "0.1", "0.25", "0.3", "0.4", "0.5")
WEIGHTS += tuple(str(1 - float(weight)) for weight in WEIGHTS[2:-1])
FLOAT_ERROR = 1.7e-7
"""Relative: 4e-8 for the fit, and about two roundings for Horner's rule in float."""
STEEP_ERROR = 1.3e-6
"""For a skewed KL with a above 1/2. Near a = 1 its slopes grow like e^2u."""


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
