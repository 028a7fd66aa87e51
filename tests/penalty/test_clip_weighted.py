"""Estimator(clip_weighted=True): clips of the weighted value, as NeMo-RL and slime have them.

The gradient must never point away from the reference: where a clip acts, it is 0.
"""

import math

import pytest
import torch
from agreement import assert_agrees

from klfast import Estimator, kl_penalty
from klfast.args.estimator import ESTIMATORS

NEMO_RL_K3 = Estimator("k3", log_ratio_clip=20, kl_clip=10, clip_weighted=True)
SLIME_LOW_VAR_KL = Estimator("k3", kl_clip=10, clip_weighted=True)
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def penalty(backend, estimator, logprobs, ref_logprobs, old_logprobs, **options):
    """(value, gradients to logprobs and ref_logprobs), per token."""
    logprobs, ref_logprobs = (t.detach().requires_grad_() for t in (logprobs, ref_logprobs))
    value = kl_penalty(
        logprobs,
        ref_logprobs,
        estimator=estimator,
        old_logprobs=old_logprobs,
        backend=backend,
        **options,
    )
    return value.detach(), torch.autograd.grad(value.sum(), (logprobs, ref_logprobs))


@pytest.mark.parametrize("reduction", ["none", "seq-sum", "token-sum"])
def test_on_policy_weights_keep_no_gradient_where_the_clip_acts(backend, reduction):
    """NeMo-RL's loss: k3 at x = -2.7 and -5 is above 10. Without clip_weighted +10 flows there."""
    logprobs = torch.tensor([-2.5, -2.7, -5.0])
    _, (grad, grad_ref) = penalty(
        backend, NEMO_RL_K3, logprobs, torch.zeros(3), logprobs, reduction=reduction
    )
    torch.testing.assert_close(grad, torch.tensor([-2.5, 0.0, 0.0]), rtol=1e-6, atol=0)
    expected = torch.tensor([math.expm1(2.5), 0.0, 0.0])
    torch.testing.assert_close(grad_ref, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("limit", [{"log_ratio_clip": 0.5}, {"kl_clip": 0.5}], ids=["x", "value"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_at_a_bound_the_weights_gradient_flows_and_beyond_it_is_0(backend, sign, limit):
    """k1 on policy: w f' + w f = 1 + x, and a bound counts as inside."""
    estimator = Estimator("k1", **limit, clip_weighted=True)
    logprobs = torch.tensor([0.5, math.nextafter(0.5, 1)], dtype=torch.float64) * sign
    _, (grad, grad_ref) = penalty(
        backend, estimator, logprobs, torch.zeros(2, dtype=torch.float64), logprobs
    )
    assert grad.tolist() == [1 + sign * 0.5, 0.0]
    assert grad_ref.tolist() == [-1.0, 0.0]


def test_a_clip_before_the_weight_still_passes_the_weights_gradient(backend):
    """The default: w * clip(f), differentiated as it is written."""
    logprobs = torch.tensor([-2.5, -2.7, -5.0])
    estimator = Estimator("k3", log_ratio_clip=20, kl_clip=10)
    _, (grad, _) = penalty(backend, estimator, logprobs, torch.zeros(3), logprobs)
    torch.testing.assert_close(grad, torch.tensor([-2.5, 10.0, 10.0]), rtol=1e-6, atol=0)


def test_the_clip_acts_on_the_product(backend):
    """Slime's low_var_kl: k3(-3) = 16.1 weighs e, and 10 is the most."""
    value, (grad, _) = penalty(
        backend, SLIME_LOW_VAR_KL, torch.tensor([-3.0]), torch.zeros(1), torch.tensor([-4.0])
    )
    assert value.tolist() == [10.0]
    assert grad.tolist() == [0.0]


def test_a_small_weight_takes_a_large_value_out_of_the_clip(backend):
    """k3(-3) = 16.1 weighs e**-3: 0.8 is no case for a clip of 10, its gradient w * x is whole."""
    value, (grad, _) = penalty(
        backend, SLIME_LOW_VAR_KL, torch.tensor([-3.0]), torch.zeros(1), torch.tensor([0.0])
    )
    weight = math.exp(-3)
    assert value.item() == pytest.approx(weight * (math.expm1(3) - 3), rel=1e-6)
    assert grad.item() == pytest.approx(weight * -3, rel=1e-6)


@every_estimator
def test_where_the_log_ratio_is_clipped_the_weight_carries_no_gradient(backend, name):
    estimator = Estimator(name, log_ratio_clip=0.5, clip_weighted=True)
    logprobs = torch.tensor([0.7, -0.7, 0.4], dtype=torch.float64)
    zeros = torch.zeros(3, dtype=torch.float64)
    value, (grad, grad_ref) = penalty(backend, estimator, logprobs, zeros, logprobs - 0.3)
    expected, _ = penalty(backend, Estimator(name), logprobs.clamp(-0.5, 0.5), zeros, None)
    torch.testing.assert_close(value, math.exp(0.3) * expected, rtol=1e-13, atol=0)
    assert not grad[:2].any()
    assert not grad_ref[:2].any()
    assert grad_ref[2] != 0


@pytest.mark.parametrize("x", [0.5, -0.5])
def test_at_the_clip_the_gradient_flows_and_beyond_it_is_0(backend, x):
    """k1 with a weight of 2: w x is 1 at the bound, exact in float64."""
    estimator = Estimator("k1", importance_cap=2.0, kl_clip=1.0, clip_weighted=True)
    for beyond, slope in ((x, 2.0), (math.nextafter(x, 2 * x), 0.0)):
        at = torch.tensor([beyond], dtype=torch.float64)
        value, (grad, grad_ref) = penalty(backend, estimator, at, torch.zeros_like(at), at - 5)
        assert value.item() == math.copysign(1.0, x)
        assert (grad.item(), grad_ref.item()) == (slope, -slope)


@pytest.mark.grid
@pytest.mark.parametrize("old_logprob", [-100.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("importance", ["differentiable", "detached"])
@pytest.mark.parametrize("gradient", ["value", "k2"])
def test_a_weight_that_is_nan_or_infinite_is_0(backend, gradient, importance, old_logprob):
    """As nan_to_num(w, nan=0, posinf=0): exp(99) is infinite in fp32. Other tokens are as ever."""
    estimator = Estimator(
        "k3", gradient=gradient, importance=importance, kl_clip=10, clip_weighted=True
    )
    logprobs, ref_logprobs = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.5])
    old_logprobs = torch.tensor([old_logprob, -1.0])
    value, grads = penalty(backend, estimator, logprobs, ref_logprobs, old_logprobs)
    alone, grads_alone = penalty(
        backend, estimator, logprobs[1:], ref_logprobs[1:], old_logprobs[1:]
    )
    assert value.tolist() == [0.0, alone.item()]
    assert [grad.tolist() for grad in grads] == [[0.0, grad.item()] for grad in grads_alone]
    _, stats = kl_penalty(
        logprobs,
        ref_logprobs,
        estimator=estimator,
        old_logprobs=old_logprobs,
        return_stats=True,
        backend=backend,
    )
    # exp(-inf) is an ordinary weight of 0
    assert stats.clipped.item() == (0 if old_logprob == torch.inf else 1)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 88.7), (torch.float64, 709.7)])
def test_a_weight_is_infinite_where_it_leaves_the_arithmetic(backend, dtype, largest):
    estimator = Estimator("k1", kl_clip=3, clip_weighted=True)
    zeros = torch.zeros(2, dtype=dtype)
    old_logprobs = torch.tensor([-largest, -largest - 0.1], dtype=dtype)
    value, _ = penalty(backend, estimator, zeros, zeros - 1, old_logprobs)
    assert value.tolist() == [3.0, 0.0]


def test_a_cap_keeps_a_weight_from_being_infinite(backend):
    estimator = Estimator("k1", importance_cap=2.0, kl_clip=3, clip_weighted=True)
    value, (grad, _) = penalty(
        backend, estimator, torch.zeros(1), torch.tensor([-1.0]), torch.tensor([-1000.0])
    )
    assert (value.item(), grad.item()) == (2.0, 2.0)


@every_estimator
def test_without_old_logprobs_it_changes_nothing(backend, name):
    logprobs = torch.linspace(-3, 3, 31)
    ref_logprobs = torch.zeros(31)
    limits = {"log_ratio_clip": 2.5, "linear_tail": 1.5, "kl_clip": 1.2}
    plain, weighted = (
        penalty(backend, Estimator(name, clip_weighted=on, **limits), logprobs, ref_logprobs, None)
        for on in (False, True)
    )
    torch.testing.assert_close(plain, weighted, rtol=0, atol=0)


@every_estimator
def test_gradcheck_inside_and_outside_the_clips(backend, name):
    """The gradient is that of the value wherever log_ratio_clip does not act."""
    estimator = Estimator(name, kl_clip=0.9, linear_tail=1.1, clip_weighted=True)
    logprobs = torch.linspace(-2.03, 1.98, 12, dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    old_logprobs = logprobs.detach() + torch.linspace(0.7, -0.8, 12).roll(5)

    def value(logprobs, ref_logprobs):
        return kl_penalty(
            logprobs,
            ref_logprobs,
            estimator=estimator,
            old_logprobs=old_logprobs,
            backend=backend,
        )

    assert torch.autograd.gradcheck(value, (logprobs, ref_logprobs))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_in_expectation_it_is_the_gradient_of_the_clipped_objective(backend, name):
    """The sum over the vocabulary of old * clip(pi / old * f), differentiated by autograd."""
    logits = torch.randn(50, dtype=torch.float64, requires_grad=True)
    pi = (3 * logits).log_softmax(-1)
    ref, old = (2 * torch.randn(2, 50, dtype=torch.float64)).log_softmax(-1)
    x, weight = pi - ref, (pi - old).exp()
    f = {"k1": x, "k2": x.square() / 2, "k3": torch.expm1(-x) + x}[name]
    objective = (old.exp() * (weight * f).clamp(-1.5, 1.5)).sum()
    estimator = Estimator(name, kl_clip=1.5, clip_weighted=True)
    found, stats = kl_penalty(
        pi,
        ref,
        old.exp(),
        estimator=estimator,
        reduction="token-sum",
        old_logprobs=old,
        return_stats=True,
        backend=backend,
    )
    assert 5 < stats.clipped < 45
    torch.testing.assert_close(found, objective, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(t, logits, retain_graph=True)[0] for t in (found, objective)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("importance", ["differentiable", "detached"])
@every_estimator
def test_extreme_products_agree_with_the_oracle(backend, name, importance):
    """Formula and weight leave fp32's range, their product or its clip does not."""
    log_ratio = torch.tensor([-100.0, -90.0, 85.0, 95.0, 100.0, 3.0, -3.0, 70.0])
    log_weight = torch.tensor([-95.0, -85.0, -83.0, -100.0, 20.0, -90.0, 88.0, 95.0])
    estimator = Estimator(name, importance=importance, kl_clip=7.7, clip_weighted=True)
    logprobs = torch.zeros(8)
    options = {"estimator": estimator, "old_logprobs": -log_weight}
    assert_agrees(backend, logprobs, -log_ratio, **options)
