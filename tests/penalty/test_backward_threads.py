"""One graph, several threads in its backward: each gets its own gradient."""

import pytest
import torch
from threads import in_threads

import klfast

ROUNDS = 400
THREADS = 3


def by_tokens(leaf, other):
    return klfast.kl_penalty(leaf, other, reduction="token-mean")


def by_logits(leaf, other):
    return klfast.kl_divergence(leaf, other, reduction="token-mean")


def backward_in_threads(result, leaf):
    """The gradients for grad_outputs 2, 3, ..., each asked for by a thread of its own."""

    def work(number):
        factor = torch.tensor(2.0 + number)
        return factor, *torch.autograd.grad(result, leaf, factor, retain_graph=True)

    return in_threads(work, THREADS)


@pytest.mark.parametrize("penalty", [by_tokens, by_logits])
def test_every_thread_gets_its_own_gradient(penalty):
    """They race for the unit gradient, which one of them scales in place."""
    inputs, other = torch.randn(2, 16, 64)
    leaf = inputs.clone().requires_grad_()
    (unit,) = torch.autograd.grad(penalty(leaf, other), leaf)
    for _ in range(ROUNDS):
        found = backward_in_threads(penalty(leaf, other), leaf)
        for factor, grad in found:
            torch.testing.assert_close(grad, factor * unit, rtol=1e-5, atol=1e-9)


def test_one_thread_alone_overwrites_the_logits():
    """inplace_backward serves one backward: of several at once, the others raise."""
    ids = torch.arange(16)
    for _ in range(100):
        logits = torch.randn(16, 64, requires_grad=True).clone()
        result = klfast.token_logprobs(logits, ids, inplace_backward=True)

        def work(_, result=result, logits=logits):
            try:
                torch.autograd.grad(result.sum(), logits, retain_graph=True)
            except RuntimeError:
                return False
            return True

        assert sum(in_threads(work, THREADS)) == 1
