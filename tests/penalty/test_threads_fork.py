"""Python threads that call at once, and processes that fork."""

import itertools
import os
import threading
import time

import pytest
import torch
from agreement import random_inputs, same_bits
from fresh import run_fresh
from threads import gradients_in_threads, in_threads

import klfast
from klfast.reduction import REDUCTIONS


def value_and_grad(logprobs, ref_logprobs, reduction, backend):
    leaf = logprobs.detach().requires_grad_()
    penalty = klfast.kl_penalty(leaf, ref_logprobs, reduction=reduction, backend=backend)
    penalty.sum().backward()
    return penalty.detach(), leaf.grad


@pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
def test_python_threads_that_call_at_once_get_the_same_bits(backend, reduction, set_num_threads):
    set_num_threads(2)
    logprobs, ref_logprobs, _ = random_inputs((4, 16500))
    expected = value_and_grad(logprobs, ref_logprobs, reduction, backend)

    def work(_):
        return [value_and_grad(logprobs, ref_logprobs, reduction, backend) for _ in range(3)]

    for found in itertools.chain(*in_threads(work, 6)):
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_threads_may_share_one_graph(reduction):
    """Only one of them can be handed the unit gradient."""
    logprobs, ref_logprobs, _ = random_inputs((4, 300))
    logprobs.requires_grad_()
    penalty = klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend="native").sum()
    (expected,) = torch.autograd.grad(
        klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend="native").sum(),
        logprobs,
    )
    assert all(same_bits(grad, expected) for grad in gradients_in_threads(penalty, logprobs, 6))


def test_a_long_call_lets_other_python_threads_run():
    """The tensor is one number seen 2^27 times: a call takes tenths of a second and no memory."""
    logprobs = torch.zeros(1, 1).expand(1, 2**27)
    span = []

    def work():
        begin = time.perf_counter()
        klfast.kl_penalty(logprobs, logprobs, reduction="token-sum", backend="native")
        span.extend((begin, time.perf_counter()))

    worker = threading.Thread(target=work)
    ticks = []
    worker.start()
    while worker.is_alive():
        time.sleep(0.002)
        ticks.append(time.perf_counter())
    begin, end = span
    assert end - begin > 0.05, "too quick to tell"
    middle = [tick for tick in ticks if begin + 0.02 < tick < end - 0.02]
    assert len(middle) >= 3


FORK = """
import os, signal, time, torch, klfast
torch.set_num_threads(2)

def work(tokens):
    logprobs = torch.full((tokens,), -1.0, requires_grad=True)
    ref_logprobs = torch.full((tokens,), -2.0)
    klfast.kl_penalty(
        logprobs, ref_logprobs, estimator="k1", reduction="token-mean", backend="native"
    ).backward()
    assert abs(logprobs.grad.sum().item() - 1) < 1e-4

def in_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends as a failure
        function()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status

def small():
    work(100)
    work(2**15 - 2)

def on_one_thread():
    torch.set_num_threads(1)
    work(2**20)

work(2**20)  # starts OpenMP's threads, which a forked child does not have
in_child(small)
in_child(on_one_thread)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_hang_where_eager_torch_does_not():
    """Beyond 2^15 tokens and one thread, eager torch itself waits for OpenMP's lost threads."""
    assert run_fresh(FORK) == "done"
