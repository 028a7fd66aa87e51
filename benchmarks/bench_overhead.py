"""What a call costs when there is next to nothing to compute: k3 on [4, 64]."""

import pytest
import torch

import klfast
from benchmarks.tokens import eager_seq_sum, eager_stats, eager_token_mean

SHAPE = (4, 64)
EAGER = {"token-mean": eager_token_mean, "seq-sum": eager_seq_sum}

reductions = pytest.mark.parametrize("reduction", EAGER)


def implementation(impl, rival, **options):
    """(logprobs, ref_logprobs, mask) -> what klfast returns, or the rival in its place."""
    if impl == "eager":
        return rival
    if impl == "compile":
        return torch.compile(rival, fullgraph=True, dynamic=False)
    return lambda *inputs: klfast.kl_penalty(*inputs, backend=impl, **options)


def truth(inputs, **options):
    logprobs, ref_logprobs, mask = inputs
    wide = (logprobs.detach().double().requires_grad_(), ref_logprobs.double(), mask)
    penalty = klfast.kl_penalty(*wide, backend="reference", **options)
    return penalty.detach(), torch.autograd.grad(penalty.sum(), wide[0])[0]


@reductions
@torch.no_grad()
def test_forward(benchmark, impl, rotating, reduction):
    benchmark.group = f"overhead, forward to {reduction}"
    call, sets = implementation(impl, EAGER[reduction], reduction=reduction), rotating(SHAPE)
    first = next(sets)
    with torch.enable_grad():
        expected, _ = truth(first, reduction=reduction)
    torch.testing.assert_close(call(*first).double(), expected, rtol=1e-4, atol=1e-6)
    benchmark(lambda: call(*next(sets)))


@reductions
def test_forward_with_graph(benchmark, impl, rotating, reduction):
    benchmark.group = f"overhead, forward to {reduction} that records a graph"
    call, sets = implementation(impl, EAGER[reduction], reduction=reduction), rotating(SHAPE)
    first = next(sets)
    expected, _ = truth(first, reduction=reduction)
    actual = call(*first)
    assert actual.requires_grad
    torch.testing.assert_close(actual.detach().double(), expected, rtol=1e-4, atol=1e-6)
    benchmark(lambda: call(*next(sets)))


@reductions
def test_forward_backward(benchmark, impl, rotating, reduction):
    benchmark.group = f"overhead, forward+backward to {reduction}"
    call, sets = implementation(impl, EAGER[reduction], reduction=reduction), rotating(SHAPE)
    grad_out = torch.ones(SHAPE[0]) if reduction == "seq-sum" else None

    def both(logprobs, ref_logprobs, mask):
        penalty = call(logprobs, ref_logprobs, mask)
        return penalty, torch.autograd.grad(penalty, logprobs, grad_out)[0]

    first = next(sets)
    for actual, expected in zip(both(*first), truth(first, reduction=reduction), strict=True):
        torch.testing.assert_close(actual.detach().double(), expected, rtol=1e-4, atol=1e-6)
    benchmark(lambda: both(*next(sets)))


@torch.no_grad()
def test_forward_with_stats(benchmark, impl, rotating):
    benchmark.group = "overhead, forward to seq-sum with stats"
    options = {"reduction": "seq-sum", "return_stats": True}
    call, sets = implementation(impl, eager_stats, **options), rotating(SHAPE)
    first = next(sets)
    with torch.enable_grad():
        expected, _ = truth(first, reduction="seq-sum")
    penalty, stats = call(*first)
    torch.testing.assert_close(penalty.double(), expected, rtol=1e-4, atol=1e-6)
    assert stats.length.tolist() == first[2].sum(-1).tolist()
    benchmark(lambda: call(*next(sets)))
