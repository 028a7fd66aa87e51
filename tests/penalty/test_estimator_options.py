"""Every field of Estimator on every estimator: values, gradients, and the order of the limits."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from agreement import assert_agrees

import klfast
from klfast import Estimator, kl_penalty
from klfast.args.estimator import ESTIMATORS

LIMITS = {
    "unlimited": {},
    "log_ratio_clip": {"log_ratio_clip": 1.3},
    "clip-pair": {"log_ratio_clip": (-0.7, 2.1)},
    "clip-above-0": {"log_ratio_clip": (0.3, 1.9)},
    "clip-below-0": {"log_ratio_clip": (-1.9, -0.3)},
    "kl_clip": {"kl_clip": 0.9},
    "linear_tail": {"linear_tail": 1.1},
    "all-limits": {"log_ratio_clip": (-3.1, 4.3), "linear_tail": 1.7, "kl_clip": 5.3},
    "weighted": {"kl_clip": 0.9, "clip_weighted": True},
    "weighted-clip-pair": {"log_ratio_clip": (-0.7, 2.1), "clip_weighted": True},
    "weighted-all": {
        "log_ratio_clip": (-3.1, 4.3),
        "linear_tail": 1.7,
        "kl_clip": 5.3,
        "clip_weighted": True,
    },
}
IMPORTANCE = {
    "no-old": None,
    "differentiable": {},
    "detached": {"importance": "detached"},
    "differentiable-cap": {"importance_cap": 1.4},
    "detached-cap": {"importance": "detached", "importance_cap": 0.8},
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
every_limit = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
every_importance = pytest.mark.parametrize("importance", IMPORTANCE.values(), ids=IMPORTANCE)
BOUNDED = {key: limits for key, limits in LIMITS.items() if limits}


def tokens(dtype=torch.float32):
    """24 tokens with log-ratios from -6 to 6 and importance weights from 0.4 to 2.6."""
    log_ratio = torch.cat([torch.linspace(-5.9, 6.1, 16), torch.linspace(-0.21, 0.2, 8)])
    logprobs = -6.5 + torch.linspace(-1, 1, 24).roll(7)
    old_logprobs = logprobs - torch.linspace(-0.9, 0.95, 24).roll(5)
    return [t.to(dtype) for t in (logprobs, logprobs - log_ratio, old_logprobs)]


def value_and_grad(backend, estimator, logprob, ref_logprob=0.0, old_logprob=None):
    """A token's value and gradient in float64, the same alone and beside one that is far off."""
    numbers = (logprob, ref_logprob) if old_logprob is None else (logprob, ref_logprob, old_logprob)
    found = []
    for count in (1, 2):
        pairs = ([n, far][:count] for n, far in zip(numbers, (40.0, 0.0, 0.0), strict=False))
        logprobs, ref, *old = (torch.tensor(pair, dtype=torch.float64) for pair in pairs)
        logprobs.requires_grad_()
        options = {"old_logprobs": old[0] if old else None, "backend": backend}
        value = klfast.kl_penalty(logprobs, ref, estimator=estimator, **options)
        (grad,) = torch.autograd.grad(value[0], logprobs)
        found.append((value[0].item(), grad[0].item()))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    "number", [Fraction(1, 3), np.float32(0.75), 1], ids=lambda number: type(number).__name__
)
@pytest.mark.parametrize("field", ["log_ratio_clip", "kl_clip", "linear_tail", "importance_cap"])
def test_any_real_number_is_a_limit(backend, field, number):
    """As the float that it is, on every backend; log_ratio_clip alone and in a pair."""
    pairs = [(number, float(number))]
    if field == "log_ratio_clip":
        pairs.append(((-number, 2 * number), (-float(number), 2 * float(number))))
    logprobs, ref_logprobs, old_logprobs = tokens()
    for limit, as_float in pairs:
        found, expected = (
            klfast.kl_penalty(
                logprobs,
                ref_logprobs,
                old_logprobs=old_logprobs,
                estimator=Estimator("k3", **{field: value}),
                backend=backend,
            )
            for value in (limit, as_float)
        )
        assert torch.equal(found, expected)
        assert all(type(bound) is float for bound in Estimator("k3", **{field: limit}).encoded()[1])


@pytest.mark.grid(each="backend")
@every_importance
@every_limit
@every_estimator
def test_every_combination_agrees_with_the_oracle(backend, name, limits, importance):
    logprobs, ref_logprobs, old_logprobs = tokens()
    estimator = Estimator(name, **limits, **(importance or {}))
    old_logprobs = None if importance is None else old_logprobs
    assert_agrees(backend, logprobs, ref_logprobs, estimator=estimator, old_logprobs=old_logprobs)


@pytest.mark.grid
@pytest.mark.parametrize("limits", ["all-limits", "weighted-all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@every_estimator
def test_every_dtype_agrees_with_the_oracle(backend, name, dtype, limits):
    logprobs, ref_logprobs, old_logprobs = tokens(dtype)
    estimator = Estimator(name, importance_cap=1.4, **LIMITS[limits])
    assert_agrees(backend, logprobs, ref_logprobs, estimator=estimator, old_logprobs=old_logprobs)


def test_limits_act_on_x_then_on_f_then_on_the_value_and_the_weight_multiplies_last(backend):
    """k2 at x = 5: clipped to 3, on the tangent at 1 that is 0.5 + (3 - 1), and w = e."""
    steps = {
        12.5: {},
        4.5: {"log_ratio_clip": 3.0},
        2.5: {"log_ratio_clip": 3.0, "linear_tail": 1.0},
        2.0: {"log_ratio_clip": 3.0, "linear_tail": 1.0, "kl_clip": 2.0},
    }
    for expected, limits in steps.items():
        estimator = Estimator("k2", **limits)
        assert value_and_grad(backend, estimator, 5.0)[0] == pytest.approx(expected, rel=1e-15)
        weighted = value_and_grad(backend, estimator, 5.0, old_logprob=4.0)[0]
        assert weighted == pytest.approx(math.e * expected, rel=1e-14)


@every_estimator
def test_at_a_bound_the_gradient_flows_and_beyond_it_is_0(backend, name):
    """As torch.clamp; 0.5 is exact, and a bound counts as inside."""
    clip = Estimator(name, log_ratio_clip=0.5)
    free = value_and_grad(backend, Estimator(name), 0.5)
    assert value_and_grad(backend, clip, 0.5) == free
    assert value_and_grad(backend, clip, math.nextafter(0.5, 1)) == (free[0], 0.0)
    below = value_and_grad(backend, Estimator(name), -0.5)
    assert value_and_grad(backend, clip, -0.5) == below
    assert value_and_grad(backend, clip, math.nextafter(-0.5, -1)) == (below[0], 0.0)


@pytest.mark.parametrize("x", [0.5, -0.5])
def test_at_kl_clip_the_gradient_flows_and_beyond_it_is_0(backend, x):
    estimator = Estimator("k1", kl_clip=0.5)
    assert value_and_grad(backend, estimator, x) == (x, 1.0)
    assert value_and_grad(backend, estimator, math.nextafter(x, 2 * x)) == (x, 0.0)


@pytest.mark.grid
@pytest.mark.parametrize("gradient", ["value", "k2"])
@pytest.mark.parametrize("limits", BOUNDED.values(), ids=BOUNDED)
@every_estimator
def test_any_limit_keeps_value_and_gradient_finite(backend, name, limits, gradient):
    """Limits act before exp: clamping what has overflowed gives a gradient of 0 times infinity."""
    estimator = Estimator(name, gradient=gradient, **limits)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logprobs = torch.tensor([1000.0, -1000.0], dtype=dtype, requires_grad=True)
        ref_logprobs = torch.zeros(2, dtype=dtype, requires_grad=True)
        for old_logprobs in (None, logprobs.detach() - 0.5):
            options = {"old_logprobs": old_logprobs, "estimator": estimator, "backend": backend}
            value = klfast.kl_penalty(logprobs, ref_logprobs, **options)
            grads = torch.autograd.grad(value.sum(), (logprobs, ref_logprobs))
            assert all(t.isfinite().all() for t in (value, *grads))


@pytest.mark.grid
@every_limit
@every_importance
@every_estimator
def test_gradient_k2_has_the_value_of_f_and_the_gradient_of_k2(backend, name, limits, importance):
    """Limits shape the value alone."""
    logprobs, ref_logprobs, old_logprobs = tokens(torch.float64)
    options = {"backend": backend, "old_logprobs": None if importance is None else old_logprobs}

    def value_and_grads(estimator):
        inputs = logprobs.clone().requires_grad_(), ref_logprobs.clone().requires_grad_()
        value = klfast.kl_penalty(*inputs, estimator=estimator, **options)
        return value.detach(), torch.autograd.grad(value.sum(), inputs)

    importance = importance or {}
    value, grads = value_and_grads(Estimator(name, gradient="k2", **limits, **importance))
    own_value, _ = value_and_grads(Estimator(name, **limits, **importance))
    _, k2_grads = value_and_grads(Estimator("k2", **importance))
    torch.testing.assert_close(value, own_value, rtol=1e-14, atol=0)
    torch.testing.assert_close(grads, k2_grads, rtol=1e-13, atol=1e-13)


@every_estimator
def test_gradient_none_carries_no_graph(backend, name):
    logprobs, ref_logprobs, _ = (t.requires_grad_() for t in tokens())
    options = {"backend": backend, "reduction": "token-mean"}
    quiet = klfast.kl_penalty(
        logprobs, ref_logprobs, estimator=Estimator(name, gradient="none"), **options
    )
    loud = klfast.kl_penalty(logprobs, ref_logprobs, estimator=name, **options)
    assert not quiet.requires_grad
    assert loud.requires_grad
    assert torch.equal(quiet, loud)


@pytest.mark.parametrize("reduction", ["none", "token-sum"])
def test_without_old_logprobs_there_is_no_weight_to_cap(backend, reduction):
    logprobs, ref_logprobs, _ = (t.requires_grad_() for t in tokens())
    options = {"reduction": reduction, "return_stats": True, "backend": backend}
    free, _ = klfast.kl_penalty(logprobs, ref_logprobs, **options)
    estimator = Estimator("k3", importance_cap=0.5)
    capped, stats = klfast.kl_penalty(logprobs, ref_logprobs, estimator=estimator, **options)
    assert torch.equal(capped, free)
    assert stats.clipped == 0
    grads = [torch.autograd.grad(value.sum(), (logprobs, ref_logprobs)) for value in (free, capped)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("logprob", "ref_logprob", "old_logprob"),
    [(-110.0, -1.0, -1.0), (-96.0, -1.0, -1.0), (-1.0, -1.0, -101.0), (-300.0, -1.0, -1.0)],
)
def test_a_weighted_token_is_finite_where_weight_or_formula_alone_is_not(
    backend, logprob, ref_logprob, old_logprob
):
    """In fp32 exp(-109) is 0 and exp(109) infinite; their product, 1, is what was asked for."""
    logprobs = torch.tensor([logprob], requires_grad=True)
    penalty = kl_penalty(
        logprobs,
        torch.tensor([ref_logprob]),
        old_logprobs=torch.tensor([old_logprob]),
        reduction="token-sum",
        backend=backend,
    )
    penalty.backward()
    x, log_weight = logprob - ref_logprob, logprob - old_logprob
    weight = math.exp(log_weight)
    expected = math.exp(log_weight - x) + weight * (x - 1)
    assert penalty.item() == pytest.approx(expected, rel=1e-6)
    assert logprobs.grad.item() == pytest.approx(weight * x, rel=1e-6, abs=1e-30)
