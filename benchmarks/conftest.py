"""Collects ``bench_*.py`` and says what the pytest-benchmark files share.

``KLFAST_BENCH_SHAPE=BxT`` sets the shape (512x8192; rows x columns); at toy size, without timing::

    KLFAST_BENCH_SHAPE=4x64 pytest benchmarks --benchmark-disable -k "not compile"

For ratios use ``python -m benchmarks``: here every candidate has its own stretch of time.
"""

import itertools
import os

import pytest
import torch

from benchmarks.cases import KEPT, SPREAD
from klfast import backends


def pytest_configure(config):
    config.addinivalue_line("python_files", "bench_*.py")
    # Inductor imports what torch itself has deprecated.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")


def pytest_make_parametrize_id(val):
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


@pytest.fixture(scope="session")
def shape():
    """[B, T] of the large cases."""
    return tuple(map(int, os.environ.get("KLFAST_BENCH_SHAPE", "512x8192").split("x")))


@pytest.fixture(params=[*backends.BACKENDS, "eager", "compile"])
def impl(request):
    """A backend of klfast, or a rival."""
    if request.param in backends.BACKENDS:
        reason = backends.BACKENDS[request.param].why_not(torch.device("cpu"))
        if reason is not None:
            pytest.skip(f"backend {request.param}: {reason}")
    torch.compiler.reset()
    return request.param


@pytest.fixture
def rotating():
    """(shape, dtype) -> an endless supply of (logprobs, ref_logprobs, mask), four sets in turn."""

    def make(shape, dtype=torch.float32):
        torch.manual_seed(0)
        sets = []
        for _ in range(4):
            logprobs = torch.empty(shape).uniform_(-5, -1)
            ref_logprobs = logprobs + SPREAD * torch.randn(shape)
            mask = torch.rand(shape) < KEPT
            sets.append((logprobs.to(dtype).requires_grad_(), ref_logprobs.to(dtype), mask))
        return itertools.cycle(sets)

    return make
