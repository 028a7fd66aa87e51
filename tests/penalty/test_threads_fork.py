"""Python threads that call at once or share one graph, and processes that fork."""

import os
import threading
import time

import pytest
import torch
from fresh import run_fresh
from threads import in_threads

import klfast


@pytest.mark.parametrize("function", [klfast.kl_penalty, klfast.kl_divergence])
def test_every_thread_in_the_backward_of_one_graph_gets_its_own_gradient(function):
    """The threads race for the unit gradient. One of them scales it in place."""
    inputs, other = torch.randn(2, 16, 64)
    leaf = inputs.clone().requires_grad_()
    (unit,) = torch.autograd.grad(function(leaf, other, reduction="token-mean"), leaf)
    for _ in range(50):
        result = function(leaf, other, reduction="token-mean")

        def work(number, result=result):
            factor = torch.tensor(2.0 + number)
            return factor, *torch.autograd.grad(result, leaf, factor, retain_graph=True)

        for factor, grad in in_threads(work, 3):
            torch.testing.assert_close(grad, factor * unit, rtol=1e-5, atol=1e-9)


def test_one_thread_alone_overwrites_the_logits():
    """inplace_backward serves one backward. If several run at once, the others raise."""
    ids = torch.arange(16)
    for _ in range(40):
        logits = torch.randn(16, 64, requires_grad=True).clone()
        result = klfast.token_logprobs(logits, ids, inplace_backward=True)

        def work(_, result=result, logits=logits):
            try:
                torch.autograd.grad(result.sum(), logits, retain_graph=True)
            except RuntimeError:
                return False
            return True

        assert sum(in_threads(work, 3)) == 1


def test_a_long_call_lets_other_python_threads_run():
    """The tensor is one number seen 2^27 times. A call takes tenths of a second and no memory."""
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
import os, signal, torch, klfast
torch.set_num_threads(2)

def in_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends as a failure
        function()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status

def on_one_thread():
    torch.set_num_threads(1)
    for work, _, large in WORK:
        work(large)

def tokens(count):
    logprobs = torch.full((count,), -1.0, requires_grad=True)
    ref_logprobs = torch.full((count,), -2.0)
    klfast.kl_penalty(
        logprobs, ref_logprobs, estimator="k1", reduction="token-mean", backend="native"
    ).backward()
    assert abs(logprobs.grad.sum().item() - 1) < 1e-4

def rows(count):
    logits = torch.zeros(count, 500, requires_grad=True)
    ref_logits = torch.zeros(count, 500)
    ref_logits[:, 0] = 3.0
    for direction in ("reverse", "jsd"):
        klfast.kl_divergence(
            logits, ref_logits, direction=direction, reduction="token-mean", backend="native"
        ).backward()
        assert logits.grad[:, 0].sum() < -1e-4
        logits.grad = None
    ids = torch.zeros(count, dtype=torch.int64)
    klfast.token_logprobs(logits, ids, backend="native").sum().backward()
    assert abs(logits.grad[0, 0].item() - (1 - 1 / 500)) < 1e-6

WORK = (tokens, 2**15 - 2, 2**20), (rows, 4, 1000)
for work, small, large in WORK:
    work(large)  # starts OpenMP's threads, which a forked child does not have
    in_child(lambda: work(small))
in_child(on_one_thread)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_hang_where_eager_torch_does_not():
    """Beyond 2^15 tokens and one thread, eager torch itself waits for OpenMP's lost threads."""
    assert run_fresh(FORK) == "done"
