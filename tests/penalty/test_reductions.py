"""Every reduction, its denominators and its factor: padded, packed, one sequence, nothing."""

import math

import pytest
import torch
from agreement import assert_agrees, random_inputs

import klfast
from klfast import Estimator
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

MASKS = {
    "no-mask": lambda shape: None,
    "bool": lambda shape: torch.rand(shape) < 0.7,
    "int": lambda shape: torch.randint(0, 3, shape),
    "float": lambda shape: torch.rand(shape) * (torch.rand(shape) < 0.7),
    "bf16": lambda shape: (torch.rand(shape) * (torch.rand(shape) < 0.7)).bfloat16(),
}
LAYOUTS = {
    "padded": ((3, 11), None),
    "one-sequence": ((19,), None),
    "packed": ((23,), [0, 0, 7, 8, 8, 20, 23, 23]),
}
EMPTY = {
    "[0, 5]": ((0, 5), None),
    "[3, 0]": ((3, 0), None),
    "[0, 0]": ((0, 0), None),
    "[0]": ((0,), None),
    "N=0": ((0,), [0, 0, 0]),
    "S=0": ((0,), [0]),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
EXACT = Estimator("k2")

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_layout = pytest.mark.parametrize(("shape", "edges"), LAYOUTS.values(), ids=LAYOUTS)


def packing(edges):
    return None if edges is None else torch.tensor(edges)


def result_shape(reduction, shape, edges):
    sequences = len(edges) - 1 if edges else (shape[0] if len(shape) == 2 else 1)
    return {"none": shape, "seq-sum": (sequences,), "seq-mean": (sequences,)}.get(reduction, ())


@pytest.mark.grid(each="backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@every_layout
@every_reduction
def test_reductions_agree_with_the_oracle(backend, reduction, shape, edges, mask, dtype):
    logprobs, ref_logprobs, _ = random_inputs(shape, dtype)
    mask = MASKS[mask](shape)
    if mask is not None and len(shape) == 2:
        mask[1] = 0
    assert_agrees(
        backend,
        logprobs,
        ref_logprobs,
        mask,
        estimator=EXACT,
        reduction=reduction,
        cu_seqlens=packing(edges),
        upstream=-0.7,
    )


@pytest.mark.grid
@pytest.mark.parametrize("as_tensor", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("coef", [0.0, 0.05, -2.5])
@every_reduction
def test_coef_scales_value_and_gradient(backend, reduction, coef, as_tensor):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 11))
    assert_agrees(
        backend,
        logprobs,
        ref_logprobs,
        MASKS["bool"]((3, 11)),
        estimator=Estimator("k3"),
        reduction=reduction,
        old_logprobs=old_logprobs,
        coef=as_tensor(coef),
    )


@pytest.mark.grid
@pytest.mark.parametrize("as_tensor", [float, torch.tensor], ids=["number", "tensor"])
@every_layout
@pytest.mark.parametrize("reduction", NORMALIZED_REDUCTIONS)
def test_normalizer_replaces_the_outer_denominator(backend, reduction, shape, edges, as_tensor):
    logprobs, ref_logprobs, _ = random_inputs(shape)
    assert_agrees(
        backend,
        logprobs,
        ref_logprobs,
        MASKS["float"](shape),
        estimator=EXACT,
        reduction=reduction,
        cu_seqlens=packing(edges),
        normalizer=as_tensor(37.5),
        coef=0.3,
    )


def test_reductions_by_hand(backend):
    """Log-ratios 1, 2 | 4 | masked under k1 with weights 1, 1 | 2 | 0."""
    logprobs = torch.tensor([[1.0, 2.0], [4.0, 9.0], [7.0, 7.0]])
    mask = torch.tensor([[1, 1], [2, 0], [0, 0]])
    expected = {
        "none": [[1.0, 2.0], [8.0, 0.0], [0.0, 0.0]],
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
        got = klfast.kl_penalty(logprobs, torch.zeros(3, 2), mask, reduction=reduction, **options)
        assert got.tolist() == value, reduction


@pytest.mark.grid
@every_reduction
@pytest.mark.parametrize(("shape", "edges"), EMPTY.values(), ids=EMPTY)
def test_empty_batches(backend, shape, edges, reduction):
    """Every value is 0, every gradient empty, every statistic 0."""
    logprobs = torch.zeros(shape, requires_grad=True)
    options = {"reduction": reduction, "cu_seqlens": packing(edges), "backend": backend}
    result, stats = klfast.kl_penalty(logprobs, torch.zeros(shape), return_stats=True, **options)
    expected = torch.zeros(result_shape(reduction, shape, edges))
    assert torch.equal(result, expected)
    (grad,) = torch.autograd.grad(result, logprobs, torch.ones_like(result))
    assert grad.shape == shape
    sequences = result_shape("seq-sum", shape, edges)
    assert all(torch.equal(field, torch.zeros(sequences)) for field in stats)
    assert stats.token_mean() == stats.sequence_mean() == 0


@pytest.mark.grid
@pytest.mark.parametrize("normalizer", [None, 8.0])
@every_layout
@every_reduction
def test_fully_masked_batches(backend, reduction, shape, edges, normalizer):
    logprobs, ref_logprobs, _ = random_inputs(shape)
    logprobs.requires_grad_()
    options = {"reduction": reduction, "cu_seqlens": packing(edges), "backend": backend}
    if reduction in NORMALIZED_REDUCTIONS:
        options["normalizer"] = normalizer
    nothing = torch.zeros(shape, dtype=torch.bool)
    result, stats = klfast.kl_penalty(logprobs, ref_logprobs, nothing, return_stats=True, **options)
    (grad,) = torch.autograd.grad(result.sum(), logprobs)
    assert torch.equal(result, torch.zeros(result_shape(reduction, shape, edges)))
    assert torch.equal(grad, torch.zeros(shape))
    assert all((field == 0).all() for field in stats)


# Long sequences


def eager_k3(logprobs, ref_logprobs, reduction):
    """What everybody writes, in the dtype of its inputs."""
    log_ratio = logprobs - ref_logprobs
    k3 = torch.exp(-log_ratio) - 1 + log_ratio
    return {"seq-sum": k3.sum(-1), "seq-mean": k3.mean(-1), "token-mean": k3.mean()}[reduction]


@pytest.mark.grid
@pytest.mark.parametrize("reduction", ["seq-sum", "seq-mean", "token-mean"])
@pytest.mark.parametrize("tokens", [16_384, 65_537, 1_000_003])
def test_long_sums_err_at_most_twice_as_much_as_eager(backend, tokens, reduction, record_property):
    """Against float64, twice eager's error in the same dtype and one rounding."""
    logprobs, ref_logprobs, _ = random_inputs((2, tokens), spread=0.5)
    truth = eager_k3(logprobs.double(), ref_logprobs.double(), reduction)
    result = klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, backend=backend)
    error = (result.double() - truth).abs() / truth
    eager_error = (eager_k3(logprobs, ref_logprobs, reduction).double() - truth).abs() / truth
    record_property("relative error", error.max().item())
    record_property("eager's", eager_error.max().item())
    assert (error <= 2 * eager_error + torch.finfo(torch.float32).eps / 2).all()


@pytest.mark.parametrize("value", [2.0**-12, 1.0])
def test_long_sums_do_not_drift(backend, value):
    """3 million equal tokens: running fp32 sums stall at 2^24 times a term."""
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


def test_gradients_of_long_sequences(backend):
    """Of a mean, from the pass that also computes it: every token's share is 1 / tokens."""
    logprobs, ref_logprobs, _ = random_inputs((2, 40_000))
    logprobs.requires_grad_()
    loss = klfast.kl_penalty(
        logprobs, ref_logprobs, estimator="k2", reduction="token-mean", backend=backend
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    truth = (logprobs.detach().double() - ref_logprobs.double()) / 80_000
    torch.testing.assert_close(grad.double(), truth, rtol=4e-7, atol=0)
