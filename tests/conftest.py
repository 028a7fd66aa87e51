"""Fixtures of every test: backends, seeds, and an error if a promised GPU is missing."""

import os
import tempfile
from pathlib import Path

import grids
import packages
import pytest
import torch
from hypothesis import HealthCheck, settings
from targets import TARGETS, serving
from torch.utils._pytree import tree_map_only

from klfast import backends
from klfast.compat import patching

# Hypothesis draws the same examples in every run. `HYPOTHESIS_PROFILE=explore` draws new ones.
# All examples of a test share the backend's fixture.
common = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}
settings.register_profile("klfast", derandomize=True, max_examples=50, **common)
settings.register_profile("explore", max_examples=1000, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "klfast"))


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", help="2/4: the second quarter of the tests")


def pytest_configure():
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # otherwise the processes' threads compete for the cores
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        # Inductor's cache does not know which vectors its code was made for.
        folder = Path(tempfile.gettempdir()) / f"torchinductor-{capability}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    if library := os.environ.get("KLFAST_TEST_ALLOCATOR"):  # tests/gpu/sanitizer_allocator.cu
        allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "allocate", "release")
        torch.cuda.memory.change_current_allocator(allocator)
    if os.environ.get("KLFAST_REQUIRE_CUDA") == "1" and not torch.cuda.is_available():
        raise pytest.UsageError("KLFAST_REQUIRE_CUDA=1, but torch.cuda.is_available() is False")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config, items):
    grids.mark_exhaustive(items)
    part = config.getoption("--part")
    items[:] = [item for item in items if grids.is_in_part(item, part)]
    # Long tests come first, so that two processes end at about the same time.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def _backends_stay():
    """Check that a test leaves the table of backends as it was.

    The fixture is set up first and torn down last, so that it sees what other fixtures restore.
    """
    before = list(backends.BACKENDS.items())
    yield
    assert before == list(backends.BACKENDS.items())


@pytest.fixture
def only_backend():
    """Leave ``auto`` one backend until the test ends. ``auto`` takes the first of the table."""
    before = {**backends.BACKENDS}

    def leave(name):
        backends.BACKENDS.clear()
        backends.BACKENDS[name] = before[name]

    yield leave
    backends.BACKENDS.clear()
    backends.BACKENDS.update(before)


@pytest.fixture(params=TARGETS)
def backend(request):
    """The name of a backend, for every backend and device here (see ``targets``)."""
    target = TARGETS[request.param]
    with serving(target):
        yield target.backend


@pytest.fixture
def has_gpu_kernels(request):
    """True if a test's backend runs a GPU's kernels, on whichever device. Triton has no others."""
    target = TARGETS[request.node.callspec.params["backend"]]
    return target.is_emulated or target.device != "cpu" or target.backend == "triton"


def _gpu_of(request):
    """The target of a test's backend, if it is on a GPU."""
    parameters = getattr(request.node, "callspec", None)
    target = TARGETS.get(parameters.params.get("backend")) if parameters else None
    return None if target is None or target.device == "cpu" else target


@pytest.fixture(autouse=True)
def _move_parameters(request):
    """Move tensors among a test's parameters, which are made on the CPU, to the target's device."""
    target = _gpu_of(request)
    if target is None:
        return
    parameters = request.node.callspec.params
    for name, value in parameters.items():
        parameters[name] = tree_map_only(torch.Tensor, lambda t: t.to(target.device), value)


@pytest.fixture
def values_are_checked(request, monkeypatch):
    """Check the values of tensors, which a GPU needs to be asked for."""
    if _gpu_of(request) is not None:
        monkeypatch.setenv("KLFAST_CHECK", "1")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make modules from sources by dotted name, and forget them after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    made = set()

    def make(sources):
        roots = {name.partition(".")[0] for name in sources}
        packages.forget(roots - made)
        made.update(roots)
        packages.write(tmp_path, sources)
        return packages.load(sources)

    yield make
    packages.forget(made)


@pytest.fixture
def nothing_stays_patched():
    """Check that a test undoes its patches."""
    yield
    assert not patching._ACTIVE
    patching._ACTIVE.clear()


@pytest.fixture
def poisoned_memory():
    """Fill new memory with NaN, so that an output that no kernel writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def set_num_threads():
    """torch.set_num_threads, undone at the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(set_num_threads):
    """One thread, for oracles that make many short passes on a shared machine."""
    set_num_threads(1)
