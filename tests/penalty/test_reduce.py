"""reduce: any per-token value, with kl_penalty's masks, layouts and denominators."""

import pytest
import torch

import klfast
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS


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
