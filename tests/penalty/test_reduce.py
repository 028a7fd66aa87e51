"""reduce: any number per token under kl_penalty's masks, layouts and denominators."""

import itertools

import pytest
import torch

import klfast
from klfast import FixedKLController
from klfast.types.dtypes import FLOATS, MASKS
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS


@pytest.fixture
def only(backend, only_backend):
    """``auto`` has one backend to take."""
    only_backend(backend)


def by_hand(values, mask, reduction, normalizer=None, coef=1.0):
    """The definition, sequence by sequence, in float64."""
    sums = [(torch.where(m != 0, v, 0.0) * m).sum() for v, m in zip(values, mask, strict=True)]
    lengths = [m.sum() for m in mask]
    means = [s / n if n > 0 else 0 * s for s, n in zip(sums, lengths, strict=True)]
    kept = sum(n > 0 for n in lengths)
    outer = {"token-mean": sum(lengths), "token-sum": 1}.get(reduction, kept)
    own = means if reduction in ("seq-mean", "seq-mean-token-mean") else sums
    if reduction in ("seq-sum", "seq-mean"):
        return coef * torch.stack(own)
    if reduction in NORMALIZED_REDUCTIONS and normalizer is not None:
        outer = normalizer
    return coef * sum(own) / outer if outer else 0 * sum(own)


@pytest.mark.parametrize("normalizer", [None, 2.5, torch.tensor(2.5)], ids=str)
@pytest.mark.parametrize("reduction", [name for name in REDUCTIONS if name != "none"])
def test_it_is_the_definition(only, reduction, normalizer):
    if normalizer is not None and reduction not in NORMALIZED_REDUCTIONS:
        pytest.skip("takes no normalizer")
    mask = (torch.rand(3, 7, dtype=torch.float64) * (torch.rand(3, 7) < 0.6)).mT.contiguous().mT
    mask[1] = 0
    values = torch.randn(3, 14, dtype=torch.float64)[:, ::2].requires_grad_()
    options = {"reduction": reduction, "normalizer": normalizer, "coef": 0.5}
    truth = by_hand(values, mask, **options)
    result = klfast.reduce(values, mask, **options)
    torch.testing.assert_close(result, truth, rtol=1e-13, atol=1e-13)
    grad_out = torch.rand_like(truth)
    grads = [torch.autograd.grad(each, values, grad_out)[0] for each in (result, truth)]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mask_dtype", MASKS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_a_reduction_values_are_masked_and_scaled(only, dtype, mask_dtype):
    values = torch.randn(2, 5).to(dtype).requires_grad_()
    mask = torch.tensor([[0, 1, 0, 2, 1], [0, 0, 0, 0, 3]]).to(mask_dtype)
    result = klfast.reduce(values, mask, reduction="none", coef=-2.0)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(result.double(), -2.0 * mask * values.double())
    (grad,) = torch.autograd.grad(result.sum(), values)
    assert torch.equal(grad.double(), -2.0 * mask.double())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), -float("inf")])
def test_what_is_masked_does_not_exist(only, reduction, hidden):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    clean = torch.where(mask, torch.randn(2, 3), 0.0).requires_grad_()
    dirty = torch.where(mask, clean.detach(), hidden).requires_grad_()
    results = [klfast.reduce(each, mask, reduction=reduction) for each in (clean, dirty)]
    grads = [
        torch.autograd.grad(result.sum(), each)[0]
        for result, each in zip(results, (clean, dirty), strict=True)
    ]
    assert torch.equal(*results)
    assert torch.equal(*grads)
    assert not grads[0][~mask].any()


@pytest.mark.parametrize("reduction", [name for name in REDUCTIONS if name != "token-sum"])
def test_infinity_that_is_kept_is_not_hidden(only, reduction):
    values = torch.tensor([[1.0, float("inf")], [2.0, 3.0]], requires_grad=True)
    result = klfast.reduce(values, reduction=reduction)
    assert result.isinf().sum() == 1
    (grad,) = torch.autograd.grad(result.sum(), values)
    assert grad.isfinite().all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_is_padded_and_empty_sequences_count_for_nothing(only, reduction, dtype):
    lengths = (3, 0, 5, 1, 0)
    ends = list(itertools.accumulate(lengths, initial=0))
    packed = torch.randn(9, requires_grad=True)
    padded = torch.zeros(5, 5)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    padded[mask] = packed.detach()
    padded.requires_grad_()
    offsets = torch.tensor(ends, dtype=dtype)
    of_packed = klfast.reduce(packed, reduction=reduction, cu_seqlens=offsets)
    of_padded = klfast.reduce(padded, mask, reduction=reduction)
    expected = of_padded[mask] if reduction == "none" else of_padded
    assert torch.equal(of_packed, expected)
    assert torch.equal(
        torch.autograd.grad(of_packed.sum(), packed)[0],
        torch.autograd.grad(of_padded.sum(), padded)[0][mask],
    )


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_sums_to_nothing(only, reduction, shape):
    values = torch.empty(shape, requires_grad=True)
    result = klfast.reduce(values, reduction=reduction)
    assert not result.any()
    result.sum().backward()
    assert values.grad.shape == shape


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_policy_loss_and_a_kl_are_averaged_alike(only, backend, reduction):
    """k1 against a reference of zeros is its argument."""
    values = torch.randn(3, 70_000)
    mask = torch.rand(3, 70_000) < 0.8
    options = {"reduction": reduction, "coef": 0.3}
    kl = klfast.kl_penalty(
        values, torch.zeros(()).expand(3, 70_000), mask, estimator="k1", backend=backend, **options
    )
    assert torch.equal(klfast.reduce(values, mask, **options), kl)


@pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean", "seq-mean-token-mean"])
def test_a_second_backward_and_an_expanded_gradient(only, reduction):
    values = torch.randn(3, 4, requires_grad=True)
    result = klfast.reduce(values, reduction=reduction)
    grad_out = torch.tensor(2.0).expand(result.shape)
    first, second = (
        torch.autograd.grad(result, values, grad_out, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)
    assert first.any()


def test_the_coefficient_may_be_a_controllers(only):
    values = torch.randn(2, 3)
    expected = klfast.reduce(values, reduction="token-sum", coef=0.25)
    for coef in (FixedKLController(0.25), torch.tensor(0.25)):
        assert torch.equal(klfast.reduce(values, reduction="token-sum", coef=coef), expected)


# torch's own: dynamo makes a Function object to trace any autograd.Function whatever.
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


def test_it_is_mapped_and_differentiated_by_torch_func():
    values, mask = torch.randn(5, 3, 4), torch.rand(3, 4) < 0.5

    def loss(values):
        return klfast.reduce(values, mask, reduction="token-mean")

    mapped = torch.func.vmap(torch.func.grad(loss))(values)
    one_by_one = torch.stack([torch.func.grad(loss)(each) for each in values])
    assert torch.equal(mapped, one_by_one)


def test_a_reduction_is_asked_for():
    with pytest.raises(TypeError, match="reduction"):
        klfast.reduce(torch.zeros(2, 3))


def test_one_sequence_is_pointed_out_once(monkeypatch):
    monkeypatch.setattr("klfast.functional.hints._given", set())
    with pytest.warns(
        UserWarning, match=r"klfast\.reduce: values of shape \[4\] without cu_seqlens"
    ):
        klfast.reduce(torch.zeros(4), reduction="seq-mean-token-sum")
