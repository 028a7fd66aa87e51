"""Tests on a GPU of the known answers before the first use.

Every family of kernels gives the answers. The tests measure the check's time and memory. The check
does not wait for the user's kernels or disturb a capture.
"""

import time

import gpu
import pytest
import torch

import klfast
from klfast import backends
from klfast.backends import known_calls, self_test
from klfast.backends.self_test import FirstUse
from klfast.ops.schemas import Ops

pytestmark = gpu.marks

MOST_SECONDS = 0.02
"""The time of a check of one function after its kernels have been loaded. The call itself would
load them too."""
CYCLES = 4_000_000_000  # the cycles of a kernel that runs for a second or two


@pytest.fixture
def first(monkeypatch):
    """The check of the native kernels before it has run."""
    native = backends.BACKENDS[gpu.needed_backend("native")]
    first = FirstUse(Ops.of("klfast"), "cuda")
    fresh = native._replace(first_use=first)
    monkeypatch.setitem(backends.BACKENDS, "native", fresh)
    return first


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def check(first, device):
    """The outcomes after every family has been checked."""
    for op in known_calls.FUNCTIONS:
        first._failure(op, device, 2)
    return set(first.results(device).values())


def logprobs(**options):
    return torch.zeros(2, 3, device="cuda", **options), torch.ones(2, 3, device="cuda")


@pytest.mark.sanitizer
def test_every_family_of_kernels_gives_its_known_answers(first):
    logits = torch.zeros(2, 5, device="cuda", requires_grad=True)
    klfast.kl_penalty(*logprobs(requires_grad=True), backend="native").sum().backward()
    klfast.token_logprobs(logits, torch.zeros(2, dtype=torch.long, device="cuda"), backend="native")
    klfast.kl_divergence(logits, logits + 1, backend="native")
    known = klfast.info()["first_use"][f"cuda:{torch.cuda.current_device()}"]
    assert known == dict.fromkeys(
        (family for op in known_calls.FUNCTIONS for family in self_test.families(op)), "ok"
    )


@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_every_device_is_checked_on_its_own(first, index):
    assert check(first, torch.device("cuda", index)) == {"ok"}


def test_it_waits_for_nothing_of_the_users(first, device):
    check(FirstUse(first._ops, "cpu", "cuda"), device)  # which loads the kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    assert check(first, device) == {"ok"}
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_its_sync_is_allowed_where_syncs_raise(first, device):
    with gpu.no_sync():
        assert check(first, device) == {"ok"}
        assert torch.cuda.get_sync_debug_mode() == 2


def test_it_takes_milliseconds_and_gives_its_memory_back(first, device):
    check(first, device)
    before = torch.cuda.memory_allocated()
    slowest = []
    for op in known_calls.FUNCTIONS:
        seconds = []
        for _ in range(7):
            begun = time.perf_counter()
            FirstUse(first._ops, "cpu", "cuda")._failure(op, device, 2)
            seconds.append(time.perf_counter() - begun)
        slowest.append((min(seconds), op))
    print(*(f"{op}: {1000 * least:.1f} ms" for least, op in slowest))
    assert max(slowest)[0] < MOST_SECONDS
    assert torch.cuda.memory_allocated() == before


def test_nothing_is_checked_in_a_capture_which_goes_on(first):
    arguments = logprobs()
    penalty = klfast.kl_penalty(*arguments, backend="native")
    first._outcomes.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = klfast.kl_penalty(*arguments, backend="native")
    assert set(first.results(captured.device).values()) == {"unchecked"}
    graph.replay()
    assert torch.equal(captured, penalty)
    klfast.kl_penalty(*arguments, backend="native")
    assert first.results(captured.device)["kl_penalty"] == "ok"


def test_a_first_call_in_a_backward_is_not_checked_and_ends(first):
    """The check's own backward would wait for the device's thread, which runs the hook."""
    outer, other = logprobs(requires_grad=True)
    inner = []
    product = outer * 2
    product.register_hook(lambda grad: inner.append(klfast.kl_penalty(grad, other)))
    product.sum().backward()
    assert len(inner) == 1
    assert set(first.results(other.device).values()) == {"unchecked"}
