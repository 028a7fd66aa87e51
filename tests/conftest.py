"""Fixtures of every test: the backends of the table, seeds, and no promised GPU that is missing."""

import os

import pytest
import torch
from hypothesis import settings

from klfast import backends

# Fuzzing draws the same examples in every run; `HYPOTHESIS_PROFILE=explore` looks for new ones.
settings.register_profile("klfast", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "klfast"))


def pytest_configure():
    if os.environ.get("KLFAST_REQUIRE_CUDA") == "1" and not torch.cuda.is_available():
        raise pytest.UsageError("KLFAST_REQUIRE_CUDA=1, but torch.cuda.is_available() is False")


@pytest.fixture(params=backends.MODULES, scope="session")
def backend(request):
    """The name of every backend that serves the CPU."""
    reason = backends.MODULES[request.param].unavailable(torch.device("cpu"))
    if reason is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def set_num_threads():
    """torch.set_num_threads, undone at the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
