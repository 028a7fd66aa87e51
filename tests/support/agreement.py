"""Comparisons of a call with the oracle and of tensors with each other."""

import oracle
import torch

import klfast
from klfast.types.reduction import REDUCTIONS

SCALAR_REDUCTIONS = tuple(name for name, r in REDUCTIONS.items() if r.is_scalar())
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a, b):
    """True if two tensors have the same bits. NaN equals itself, and -0 is not 0."""
    integer = INTEGERS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(integer), b.contiguous().view(integer)
    )


def all_same_bits(found, expected):
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def random_inputs(shape, dtype=torch.float32, spread=1.0):
    """(logprobs, ref_logprobs, old_logprobs) as training makes them."""
    logprobs = -4 * torch.rand(shape, dtype=torch.float64)
    ref_logprobs = logprobs - spread * torch.randn(shape, dtype=torch.float64)
    old_logprobs = logprobs + 0.3 * torch.randn(shape, dtype=torch.float64)
    return logprobs.to(dtype), ref_logprobs.to(dtype), old_logprobs.to(dtype)


def penalty_and_grads(backend, estimator, logprobs, ref_logprobs, old_logprobs=None, **options):
    """(the value of a call, gradients of its sum to logprobs and ref_logprobs)."""
    leaves = [t.detach().clone().requires_grad_() for t in (logprobs, ref_logprobs)]
    options |= {"estimator": estimator, "old_logprobs": old_logprobs, "backend": backend}
    value = klfast.kl_penalty(*leaves, **options)
    return value.detach(), torch.autograd.grad(value.sum(), leaves)


def assert_agrees(backend, logprobs, ref_logprobs, mask=None, *, upstream=1.0, **options):
    """Compare the result, both gradients and the statistics of a call with the oracle.

    Backends compute the gradient differently for both inputs, for one, and a second time. All three
    are compared. ``upstream`` scales the uneven incoming gradient.
    """
    logprobs = logprobs.detach().requires_grad_()
    ref_logprobs = ref_logprobs.detach().requires_grad_()
    options |= {"backend": backend}
    result, stats = klfast.kl_penalty(logprobs, ref_logprobs, mask, return_stats=True, **options)
    grad_out = upstream * torch.linspace(1, 1.75, result.numel(), dtype=result.dtype)
    grad_out = grad_out.reshape(result.shape)

    of_oracle = {name: value for name, value in options.items() if name != "backend"}
    truth = oracle.kl_penalty(logprobs, ref_logprobs, mask, grad_out=grad_out, **of_oracle)
    arithmetic = oracle.arithmetic_dtype(logprobs, ref_logprobs, options.get("old_logprobs"))
    assert result.dtype == arithmetic
    oracle.assert_within(result, truth.result, truth.result_tolerance, "result")
    for field, value in stats._asdict().items():
        assert value.dtype == arithmetic
        oracle.assert_within(value, truth.stats[field], truth.stats_tolerance[field], field)
    if options["estimator"].gradient == "none":
        assert not result.requires_grad
        return

    inputs = (logprobs, ref_logprobs)
    alone = klfast.kl_penalty(logprobs, ref_logprobs.detach(), mask, **options)
    for grads in (
        torch.autograd.grad(result, inputs, grad_out, retain_graph=True),
        torch.autograd.grad(result, inputs, grad_out),
        torch.autograd.grad(alone, inputs[:1], grad_out),
    ):
        truths = (truth.grad, truth.grad_ref)
        for grad, exact, to in zip(grads, truths, inputs, strict=False):
            assert grad.dtype == to.dtype
            what = "grad" if to is logprobs else "grad_ref"
            oracle.assert_within(grad, exact, truth.grad_tolerance, what)
