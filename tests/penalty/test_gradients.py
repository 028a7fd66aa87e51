"""Gradients of kl_penalty, besides the tests that tests/conformance has for every function.

The tests cover the unit gradient of a scalar, which the forward computes, and gradients of numbers
that are not finite or below a dtype's range.
"""

import pytest
import torch
from agreement import SCALAR_REDUCTIONS, random_inputs

import klfast
from klfast.types.reduction import REDUCTIONS

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
one_of_each_kind = pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])


def leaves(*shape, dtype=torch.float32):
    """(logprobs, ref_logprobs) that ask for gradients."""
    logprobs, ref_logprobs, _ = random_inputs(shape, dtype)
    return logprobs.requires_grad_(), ref_logprobs.requires_grad_()


@every_reduction
def test_a_tensor_against_itself_gets_both_gradients(backend, reduction):
    """The log-ratio is 0 whatever the tensor holds, so the two gradients cancel."""
    logprobs, _ = leaves(3, 5)
    penalty = klfast.kl_penalty(
        logprobs, logprobs, estimator="r_log_r", reduction=reduction, backend=backend
    )
    penalty.sum().backward()
    assert torch.equal(logprobs.grad, torch.zeros(3, 5))


@pytest.mark.grid
@pytest.mark.parametrize("factor", [0.0, 1.0, -0.5, 8.0, 0.3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", SCALAR_REDUCTIONS)
def test_scaling_the_unit_gradient_equals_computing_it_anew(backend, reduction, dtype, factor):
    """A scaled unit gradient has two roundings. A power of two adds none."""
    inputs = leaves(2, 70, dtype=dtype)
    loss = factor * klfast.kl_penalty(*inputs, reduction=reduction, coef=0.2, backend=backend)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    anew = torch.autograd.grad(loss, inputs)
    rtol = 0 if factor in (0.0, 1.0, -0.5, 8.0) else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(first, anew, rtol=rtol, atol=0)
    assert factor == 0 or all(grad.count_nonzero() > 130 for grad in anew)


def test_fp16_gradients_of_a_long_mean_keep_their_digits_under_loss_scaling(backend):
    """A token's share of 4M is 2e-7, which is below fp16's precision. Times 65536 it is not."""
    tokens, scale = 2**22, 65536.0
    x = torch.linspace(-2, 2, 2**11, dtype=torch.float16).repeat(tokens // 2**11)
    logprobs = x.reshape(1, -1).requires_grad_()
    ref_logprobs = torch.zeros(1, tokens, dtype=torch.float16)
    penalty = klfast.kl_penalty(logprobs, ref_logprobs, reduction="token-mean", backend=backend)
    (scale * penalty).backward()
    exact = -torch.expm1(-x.double()) * scale / tokens
    error = (logprobs.grad[0].double() - exact).abs()
    half_a_unit = torch.finfo(torch.float16).eps / 2 * exact.abs() + 2**-25
    assert (error <= 1.001 * half_a_unit).all()


@one_of_each_kind
def test_statistics_old_logprobs_and_a_tensor_coef_get_no_gradient(backend, reduction):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 5))
    constants = {
        "old_logprobs": old_logprobs.requires_grad_(),
        "coef": torch.tensor(0.3, requires_grad=True),
    }
    penalty, stats = klfast.kl_penalty(
        *(logprobs.requires_grad_(), ref_logprobs),
        reduction=reduction,
        return_stats=True,
        backend=backend,
        **constants,
    )
    penalty.sum().backward()
    assert logprobs.grad.count_nonzero() == 15
    assert all(constant.grad is None for constant in constants.values())
    assert not any(field.requires_grad for field in (*stats, *stats.as_dict().values()))


@pytest.mark.grid
@pytest.mark.parametrize("needs", [(True, False), (True, True)], ids=["logprobs", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["k2", "k3"])
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_a_kept_nan_is_nan_in_the_gradient_too(backend, reduction, name, dtype, needs):
    """A gradient of 0 would hide the NaN. The dtype, and who asks for a gradient, do not matter."""
    logprobs, ref_logprobs = leaves(2, 3, dtype=dtype)
    with torch.no_grad():
        logprobs[1, 2] = torch.nan
    penalty = klfast.kl_penalty(
        *(logprobs, ref_logprobs.requires_grad_(needs[1])),
        estimator=name,
        reduction=reduction,
        backend=backend,
    )
    penalty.sum().backward()
    expected = torch.zeros(2, 3, dtype=torch.bool)
    expected[1, 2] = True
    assert torch.equal(logprobs.grad.isnan(), expected)
    assert not needs[1] or torch.equal(ref_logprobs.grad.isnan(), expected)


@pytest.mark.parametrize("wanted", ["scale", "ref_logprobs"])
def test_a_mixed_second_derivative_raises(wanted):
    """A derivative of the gradient by another tensor is a second derivative too."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ref_logprobs = torch.tensor([-1.5, -2.2], requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    penalty = scale * klfast.kl_penalty(
        logprobs, ref_logprobs, reduction="token-sum", backend="native"
    )
    (grad,) = torch.autograd.grad(penalty, logprobs, create_graph=True)
    by = scale if wanted == "scale" else ref_logprobs
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.square().sum() + by.square().sum(), by)
