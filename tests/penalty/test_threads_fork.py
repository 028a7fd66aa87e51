"""Python threads that call at once, and processes that fork."""

import itertools
import os
import threading
import time

import pytest
import torch
from agreement import random_inputs, same_bits
from fresh import run_fresh
from threads import in_threads

import klfast


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
    work(large)

work(large)  # starts OpenMP's threads, which a forked child does not have
in_child(lambda: work(small))
in_child(on_one_thread)
print("done")
"""

WORK = {
    "tokens": """
small, large = 2**15 - 2, 2**20

def work(tokens):
    logprobs = torch.full((tokens,), -1.0, requires_grad=True)
    ref_logprobs = torch.full((tokens,), -2.0)
    klfast.kl_penalty(
        logprobs, ref_logprobs, estimator="k1", reduction="token-mean", backend="native"
    ).backward()
    assert abs(logprobs.grad.sum().item() - 1) < 1e-4
""",
    "logits": """
small, large = 4, 1000

def work(rows):
    logits = torch.zeros(rows, 500, requires_grad=True)
    ref_logits = torch.zeros(rows, 500)
    ref_logits[:, 0] = 3.0
    ids = torch.zeros(rows, dtype=torch.int64)
    for direction in ("reverse", "jsd"):
        klfast.kl_divergence(
            logits, ref_logits, direction=direction, reduction="token-mean", backend="native"
        ).backward()
        assert logits.grad[:, 0].sum() < -1e-4
        logits.grad = None
    klfast.token_logprobs(logits, ids, backend="native").sum().backward()
    assert abs(logits.grad[0, 0].item() - (1 - 1 / 500)) < 1e-6
""",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_forked_child_does_not_hang_where_eager_torch_does_not(work):
    """Beyond 2^15 tokens and one thread, eager torch itself waits for OpenMP's lost threads."""
    imports = "import torch, klfast\n"
    assert run_fresh(imports + work + FORK) == "done"
