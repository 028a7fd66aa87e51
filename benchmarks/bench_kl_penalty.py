"""Forward and backward of every estimator, klfast's backends beside eager and ``torch.compile``."""

import pytest
import torch

import klfast
from klfast.backends.reference.penalty import FORMULAS
from klfast.estimator import ESTIMATORS

# k3 and its mirror as the frameworks write them; the others have one way to be written.
EAGER = {
    **FORMULAS,
    "k3": lambda x: torch.exp(-x) - 1 + x,
    "k3_ref": lambda x: torch.exp(x) - 1 - x,
}

estimators = pytest.mark.parametrize("estimator", ESTIMATORS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def eager(estimator, reduction):
    formula = EAGER[estimator]

    def tokens(logprobs, ref_logprobs, mask):
        return formula(logprobs.float() - ref_logprobs.float()) * mask

    def seq_sum(logprobs, ref_logprobs, mask):
        return tokens(logprobs, ref_logprobs, mask).sum(-1)

    def token_mean(logprobs, ref_logprobs, mask):
        return tokens(logprobs, ref_logprobs, mask).sum() / mask.sum()

    return {"seq-sum": seq_sum, "token-mean": token_mean}[reduction]


def implementation(impl, estimator, reduction):
    """(logprobs, ref_logprobs, mask) -> penalty."""
    if impl == "eager":
        return eager(estimator, reduction)
    if impl == "compile":
        return torch.compile(eager(estimator, reduction), fullgraph=True, dynamic=False)

    def penalty(logprobs, ref_logprobs, mask):
        return klfast.kl_penalty(
            logprobs, ref_logprobs, mask, estimator=estimator, reduction=reduction, backend=impl
        )

    return penalty


def truth(estimator, reduction, logprobs, ref_logprobs, mask):
    """(penalty, gradient of its sum) in float64."""
    logprobs = logprobs.detach().double().requires_grad_()
    penalty = klfast.kl_penalty(
        logprobs,
        ref_logprobs.double(),
        mask,
        estimator=estimator,
        reduction=reduction,
        backend="reference",
    )
    return penalty.detach(), torch.autograd.grad(penalty.sum(), logprobs)[0]


def assert_close(actual, expected, relative=1e-4):
    atol = relative * expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


@estimators
@dtypes
@torch.no_grad()
def test_forward(benchmark, impl, rotating, shape, estimator, dtype):
    benchmark.group = f"forward, {estimator} to seq-sum, {dtype}, {list(shape)}"
    call, sets = implementation(impl, estimator, "seq-sum"), rotating(shape, dtype)
    first = next(sets)
    with torch.enable_grad():
        expected, _ = truth(estimator, "seq-sum", *first)
    assert_close(call(*first), expected)
    benchmark(lambda: call(*next(sets)))


@pytest.mark.parametrize("reduction", ["token-mean", "seq-sum"])
@estimators
@dtypes
def test_forward_backward(benchmark, impl, rotating, shape, estimator, dtype, reduction):
    benchmark.group = f"forward+backward, {estimator} to {reduction}, {dtype}, {list(shape)}"
    call, sets = implementation(impl, estimator, reduction), rotating(shape, dtype)
    grad_out = torch.ones(shape[0]) if reduction == "seq-sum" else None

    def both(logprobs, ref_logprobs, mask):
        penalty = call(logprobs, ref_logprobs, mask)
        return penalty, torch.autograd.grad(penalty, logprobs, grad_out)[0]

    first = next(sets)
    for actual, expected in zip(both(*first), truth(estimator, reduction, *first), strict=True):
        assert_close(actual.detach(), expected, relative=max(1e-4, torch.finfo(actual.dtype).eps))
    benchmark(lambda: both(*next(sets)))
