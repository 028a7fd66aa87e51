"""One graph, several threads in its backward: each gets its own gradient."""

import sys
import threading

import pytest
import torch

import klfast

ROUNDS = 400
THREADS = 3


@pytest.fixture
def restless():
    """Threads that take turns after a microsecond, where 5 ms are usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def by_tokens(leaf, other):
    return klfast.kl_penalty(leaf, other, reduction="token-mean")


def by_logits(leaf, other):
    return klfast.kl_divergence(leaf, other, reduction="token-mean")


def backward_in_threads(result, leaf):
    """The gradients for grad_outputs 2, 3, ..., each asked for by a thread of its own."""
    found, start = {}, threading.Barrier(THREADS)

    def run(factor):
        start.wait()
        (found[factor],) = torch.autograd.grad(
            result, leaf, torch.tensor(float(factor)), retain_graph=True
        )

    threads = [threading.Thread(target=run, args=(factor,)) for factor in range(2, 2 + THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("penalty", [by_tokens, by_logits])
def test_every_thread_gets_its_own_gradient(restless, penalty):
    """They race for the unit gradient, which one of them scales in place."""
    inputs, other = torch.randn(2, 16, 64)
    leaf = inputs.clone().requires_grad_()
    (unit,) = torch.autograd.grad(penalty(leaf, other), leaf)
    for _ in range(ROUNDS):
        found = backward_in_threads(penalty(leaf, other), leaf)
        for factor, grad in found.items():
            torch.testing.assert_close(grad, factor * unit, rtol=1e-5, atol=1e-9)


def test_one_thread_alone_overwrites_the_logits(restless):
    """inplace_backward serves one backward: of several at once, the others raise."""
    ids = torch.arange(16)
    for _ in range(100):
        logits = torch.randn(16, 64, requires_grad=True).clone()
        result = klfast.token_logprobs(logits, ids, inplace_backward=True)
        succeeded, start = [], threading.Barrier(THREADS)

        def run(result=result, logits=logits, succeeded=succeeded, start=start):
            start.wait()
            try:
                torch.autograd.grad(result.sum(), logits, retain_graph=True)
                succeeded.append(True)
            except RuntimeError:
                pass

        threads = [threading.Thread(target=run) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(succeeded) == 1
