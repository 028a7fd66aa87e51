"""Comparisons of a call with the oracle and of tensors with each other."""

import oracle
import torch

import klfast

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a, b):
    """Whether two tensors hold the same bits: NaN equals itself, and -0 is not 0."""
    integer = INTEGERS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(integer), b.contiguous().view(integer)
    )


def random_inputs(shape, dtype=torch.float32, spread=1.0):
    """(logprobs, ref_logprobs, old_logprobs) as training makes them."""
    logprobs = -4 * torch.rand(shape, dtype=torch.float64)
    ref_logprobs = logprobs - spread * torch.randn(shape, dtype=torch.float64)
    old_logprobs = logprobs + 0.3 * torch.randn(shape, dtype=torch.float64)
    return logprobs.to(dtype), ref_logprobs.to(dtype), old_logprobs.to(dtype)


def assert_agrees(backend, logprobs, ref_logprobs, mask=None, *, grad_out=None, **options):
    """Result, both gradients and statistics of a call are the oracle's, within its tolerances."""
    truth = oracle.kl_penalty(logprobs, ref_logprobs, mask, grad_out=grad_out, **options)
    logprobs = logprobs.detach().requires_grad_()
    ref_logprobs = ref_logprobs.detach().requires_grad_()
    result, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, mask, return_stats=True, backend=backend, **options
    )
    arithmetic = oracle.arithmetic_dtype(logprobs, ref_logprobs, options.get("old_logprobs"))
    assert result.dtype == arithmetic
    oracle.assert_within(result, truth.result, truth.result_tolerance, "result")
    for field, value in stats._asdict().items():
        assert value.dtype == arithmetic
        assert not value.requires_grad
        oracle.assert_within(value, truth.stats[field], truth.stats_tolerance[field], field)
    if options["estimator"].gradient == "none":
        assert not result.requires_grad
        return
    upstream = torch.ones_like(result) if grad_out is None else grad_out
    both = torch.autograd.grad(result, (logprobs, ref_logprobs), upstream, retain_graph=True)
    alone = torch.autograd.grad(
        klfast.kl_penalty(logprobs, ref_logprobs.detach(), mask, backend=backend, **options),
        logprobs,
        upstream,
    )
    again = torch.autograd.grad(result, (logprobs, ref_logprobs), upstream)
    for name, grads in {"": both, " of logprobs alone": alone, " once more": again}.items():
        assert grads[0].dtype == logprobs.dtype
        oracle.assert_within(grads[0], truth.grad, truth.grad_tolerance, f"grad{name}")
        if len(grads) == 2:
            assert grads[1].dtype == ref_logprobs.dtype
            oracle.assert_within(
                grads[1], truth.grad_ref, truth.grad_tolerance, f"grad_ref_logprobs{name}"
            )
