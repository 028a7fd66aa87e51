"""The polynomials of a JSD: ``csrc/formulas/jsd_fit.h``, compiled by itself, against mpmath."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import mpmath
import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
BETAS = ("1e-20", "1e-6", "1e-4", "1e-3", "0.01", "0.1", "0.25", "0.3", "0.4", "0.5")
BETAS += tuple(str(1 - float(beta)) for beta in BETAS[2:-1])
FLOAT_ERROR = 1.7e-7
"""Relative: of the fit 4e-8, of Horner's rule in float about two roundings."""

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason=f"needs a C++ compiler, has no {COMPILER[0]!r}"
)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Weight -> (u in nats, the three polynomials) at every u of the grid."""
    path = tmp_path_factory.mktemp("jsd_fit") / "jsd_fit"
    source = Path(__file__).with_name("jsd_fit.cpp")
    # Each step fuses, as on a device.
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-ffp-contract=off"]
    flags += ["-DKLFAST_EMULATE_CUDA", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*COMPILER, *flags, str(source), "-o", str(path)], check=True)

    def run(beta):
        done = subprocess.run([str(path), beta], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            bits, *found = (mpmath.mpf(float.fromhex(word)) for word in line.split())
            yield bits, found

    return run


def terms(u, b):
    """A word's term of the JSD over p, log(m / p) and log(q / m), of a log-ratio of u nats."""
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
