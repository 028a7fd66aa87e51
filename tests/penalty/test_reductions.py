"""Reductions: denominators by hand and by the oracle, long sums, and no unwritten output."""

import itertools
import math

import pytest
import torch
from agreement import assert_agrees, random_inputs, same_bits
from masked import MASKS, last_alone

import klfast
from klfast import Estimator
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

LAYOUTS = {
    "padded": ((3, 11), None),
    "one-sequence": ((19,), None),
    "packed": ((23,), [0, 0, 7, 8, 8, 20, 23, 23]),
}
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_layout = pytest.mark.parametrize(("shape", "edges"), LAYOUTS.values(), ids=LAYOUTS)


def packing(edges):
    return None if edges is None else torch.tensor(edges)


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "weights"])
@every_layout
@every_reduction
def test_the_reference_agrees_with_the_oracle(reduction, shape, edges, masked):
    """tests/conformance compares the kernels with the reference."""
    logprobs, ref_logprobs, _ = random_inputs(shape)
    mask = torch.rand(shape) * (torch.rand(shape) < 0.7) if masked else None
    if masked and len(shape) == 2:
        mask[1] = 0
    for options in ({}, {"normalizer": torch.tensor(37.5), "coef": 0.3}):
        if options and reduction not in NORMALIZED_REDUCTIONS:
            options = {"coef": -2.5}
        assert_agrees(
            *("reference", logprobs, ref_logprobs, mask),
            estimator=Estimator("k2"),
            reduction=reduction,
            cu_seqlens=packing(edges),
            upstream=-0.7,
            **options,
        )


def test_reductions_by_hand(backend):
    """Log-ratios 1, 2 | 4 | masked, under k1 with weights 1, 1 | 2 | 0."""
    logprobs = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 0], [2, 0, 0], [0, 0, 0]])
    expected = {
        "none": [[1.0, 2.0, 0.0], [8.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        "seq-sum": [3.0, 8.0, 0.0],
        "seq-mean": [1.5, 4.0, 0.0],
        "token-sum": 11.0,
        "token-mean": 11 / 4,
        "seq-mean-token-sum": 11 / 2,
        "seq-mean-token-mean": 5.5 / 2,
    }
    assert set(expected) == set(REDUCTIONS)
    options = {"estimator": "k1", "backend": backend}
    for reduction, value in expected.items():
        got = klfast.kl_penalty(logprobs, torch.zeros(3, 3), mask, reduction=reduction, **options)
        assert got.tolist() == value, reduction


@pytest.mark.parametrize("value", [2.0**-12, 1.0])
def test_long_sums_do_not_drift(backend, value):
    """3 million equal tokens. A running fp32 sum would stall at 2^24 times a term."""
    tokens = 3_000_000
    logprobs = torch.full((), value).expand(tokens)
    result, stats = klfast.kl_penalty(
        logprobs,
        torch.zeros(()).expand(tokens),
        estimator="k1",
        reduction="token-sum",
        return_stats=True,
        backend=backend,
    )
    assert result == stats.kl == stats.k1 == tokens * value
    assert stats.length == tokens
    assert stats.k2 == tokens * value**2 / 2
    assert math.isclose(stats.token_mean(), value, rel_tol=1e-7)


@every_reduction
def test_more_tokens_than_a_16_bit_index_counts(backend, reduction):
    """Only the last of 65,537 tokens is kept, so it alone is every sum and mean."""
    x, mask = last_alone(0.75)
    leaf = x.requires_grad_()
    options = {"estimator": "k1", "reduction": reduction, "backend": backend}
    result = klfast.kl_penalty(leaf, torch.zeros_like(x), mask, **options)
    (grad,) = torch.autograd.grad(result.sum(), leaf)
    kept = {"none": (1, -1), "seq-sum": (1,), "seq-mean": (1,)}.get(reduction, ())
    assert result[kept].item() == 0.75
    assert result.sum().item() == 0.75
    assert same_bits(grad, mask.float())


SHAPES = {"one": (1, 1), "odd": (3, 67), "long": (2, 1500), "no-tokens": (3, 0), "none": (0, 5)}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("mask", [*MASKS.values(), "packed"], ids=[*MASKS, "packed"])
@every_reduction
def test_every_output_is_written(backend, reduction, mask):
    assert torch.empty(3).isnan().all()
    options = {"backend": backend}
    shapes = SHAPES.values()
    if mask == "packed":
        shapes, mask = [(1500,)], lambda shape: None
        options["cu_seqlens"] = torch.tensor([0, 0, 3, 3, 1500, 1500])
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        inputs = [t.requires_grad_() for t in random_inputs(shape, dtype)[:2]]
        result, stats = klfast.kl_penalty(
            *inputs, mask(shape), reduction=reduction, return_stats=True, **options
        )
        first = torch.autograd.grad(result.sum(), inputs, retain_graph=True)
        again = torch.autograd.grad(result.sum(), inputs)
        rewards = klfast.kl_rewards(
            torch.zeros_like(stats.kl), *inputs, mask(shape), kl_coef=0.1, **options
        )
        assert not any(t.isnan().any() for t in (result, *stats, *first, *again, rewards))


@pytest.fixture
def only(backend, only_backend):
    """Leave ``auto`` this backend alone."""
    only_backend(backend)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_policy_loss_and_a_kl_are_averaged_alike(only, backend, reduction):
    """k1 against a reference of zeros is its argument. Its gradient is the mask's share."""
    mask = torch.rand(4, 20_000) * (torch.rand(4, 20_000) < 0.8)
    mask[1] = 0
    values = torch.where(mask > 0, torch.randn(4, 20_000), torch.nan).requires_grad_()
    zeros = torch.zeros(()).expand(4, 20_000)
    for normalizer in (None, torch.tensor(2.5)):
        options = {"reduction": reduction, "coef": 0.3}
        if reduction in NORMALIZED_REDUCTIONS:
            options["normalizer"] = normalizer
        kl = klfast.kl_penalty(values, zeros, mask, estimator="k1", backend=backend, **options)
        result = klfast.reduce(values, mask, **options)
        assert torch.equal(result, kl)
        grads = [torch.autograd.grad(each.sum(), values)[0] for each in (result, kl)]
        assert torch.equal(*grads)


# Dynamo makes a Function object to trace any autograd.Function.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "token-mean"])
def test_it_compiles_whole(reduction):
    values, mask = torch.randn(3, 4, requires_grad=True), torch.rand(3, 4) < 0.5

    def loss(values):
        return klfast.reduce(values.exp(), mask, reduction=reduction).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(values), loss(values))
    grads = [torch.autograd.grad(f(values), values)[0] for f in (compiled, loss)]
    torch.testing.assert_close(*grads)
