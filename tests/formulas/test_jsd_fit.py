"""The polynomials of a JSD in ``csrc/formulas/jsd_fit.h``, compared with mpmath."""

import mpmath
import pytest

BETAS = ("1e-20", "1e-6", "1e-4", "1e-3", "0.01", "0.1", "0.25", "0.3", "0.4", "0.5")
BETAS += tuple(str(1 - float(beta)) for beta in BETAS[2:-1])
FLOAT_ERROR = 1.7e-7
"""Relative: 4e-8 for the fit, and about two roundings for Horner's rule in float."""


@pytest.fixture(scope="module")
def fitted(compiled):
    """Weight -> (u in nats, the three polynomials) at every u of the grid."""
    # Each step fuses, as on a device.
    program = compiled("jsd_fit", "-O1", "-ffp-contract=off", "-DKLFAST_EMULATE_CUDA")

    def run(beta):
        for line in program(beta):
            bits, *found = (mpmath.mpf(float.fromhex(word)) for word in line.split())
            yield bits, found

    return run


def terms(u, b):
    """A term of the JSD over p, log(m / p) and log(q / m), for a log-ratio of u nats."""
    m = (1 - b) + b * mpmath.exp(u)
    log_m = mpmath.log(m)
    return b * mpmath.exp(u) * (u - log_m) - (1 - b) * log_m, log_m, u - log_m


@pytest.mark.parametrize("beta", BETAS)
def test_the_terms_of_near_words(fitted, beta):
    with mpmath.workdps(80):
        b = mpmath.mpf(float(beta))
        worst = 0
        points = list(fitted(beta))
        assert len(points) == 401
        for bits, (value, log_m_over_p, log_q_over_m) in points:
            u = bits * mpmath.log(2)
            if bits == 0:
                truth = (b * (1 - b) / 2 * mpmath.log(2) ** 2, b * mpmath.log(2))
                truth += ((1 - b) * mpmath.log(2),)
            else:
                exact = terms(u, b)
                truth = (exact[0] / bits**2, exact[1] / bits, exact[2] / bits)
            for found, of in zip((value, log_m_over_p, log_q_over_m), truth, strict=True):
                worst = max(worst, abs(found / of - 1))
        assert worst <= FLOAT_ERROR
