"""Limits and weights of Estimator: their bounds, and numbers beyond the range of exp.

The gradient never points away from the reference. It is 0 where a clip acts.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from agreement import assert_agrees, penalty_and_grads
from hypothesis import given, settings
from hypothesis import strategies as st

from klfast import Estimator, kl_penalty
from klfast.args.estimator import ESTIMATORS, GRADIENTS, IMPORTANCE

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def tokens(dtype=torch.float32):
    """24 tokens with log-ratios from -6 to 6 and importance weights from 0.4 to 2.6."""
    log_ratio = torch.cat([torch.linspace(-5.9, 6.1, 16), torch.linspace(-0.21, 0.2, 8)])
    logprobs = -6.5 + torch.linspace(-1, 1, 24).roll(7)
    old_logprobs = logprobs - torch.linspace(-0.9, 0.95, 24).roll(5)
    return [t.to(dtype) for t in (logprobs, logprobs - log_ratio, old_logprobs)]


def of_token(backend, estimator, *numbers):
    """A token's value and gradients in float64. They are the same alone and beside a far token."""
    found = []
    for others in ([], [(40.0, 0.0, 0.0)[: len(numbers)]]):
        columns = (torch.tensor(c, dtype=torch.float64) for c in zip(numbers, *others, strict=True))
        value, grads = penalty_and_grads(backend, estimator, *columns)
        found.append([t[0].item() for t in (value, *grads)])
    assert found[0] == found[1]
    return found[0]


estimators = st.builds(
    Estimator,
    name=st.sampled_from(ESTIMATORS),
    gradient=st.sampled_from(GRADIENTS),
    importance=st.sampled_from(IMPORTANCE),
    importance_cap=st.sampled_from([None, 0.7123, 1.4142]),
    log_ratio_clip=st.sampled_from([None, 1.2345, (-0.7123, 2.1234), (0.3, 1.9), (-1.9, -0.3)]),
    kl_clip=st.sampled_from([None, 0.8123, 5.3]),
    clip_weighted=st.booleans(),
    linear_tail=st.sampled_from([None, 0.5123, 1.7321]),
)


@settings(max_examples=40)
@given(estimator=estimators, weighs=st.booleans(), dtype=st.sampled_from(["float32", "float64"]))
def test_the_reference_agrees_with_the_oracle(estimator, weighs, dtype):
    """tests/conformance compares the kernels with the reference."""
    logprobs, ref_logprobs, old_logprobs = tokens(getattr(torch, dtype))
    old_logprobs = old_logprobs if weighs else None
    assert_agrees(
        "reference", logprobs, ref_logprobs, estimator=estimator, old_logprobs=old_logprobs
    )


@pytest.mark.parametrize("field", ["log_ratio_clip", "kl_clip", "linear_tail", "importance_cap"])
def test_any_real_number_is_a_limit(field):
    for number in (Fraction(1, 3), np.float32(0.75), 1):
        own, plain = (Estimator("k3", **{field: n}).encoded() for n in (number, float(number)))
        assert own == plain
        assert all(type(bound) is float for bound in own[1])


# At a bound. 0.5 is exact, and a bound counts as inside, as in torch.clamp.


@every_estimator
def test_at_log_ratio_clip_the_gradient_flows_and_beyond_it_is_0(backend, name):
    clip = Estimator(name, log_ratio_clip=0.5)
    for x in (0.5, -0.5):
        free = of_token(backend, Estimator(name), x, 0.0)
        assert of_token(backend, clip, x, 0.0) == free
        assert of_token(backend, clip, math.nextafter(x, 2 * x), 0.0) == [free[0], 0.0, 0.0]


@pytest.mark.parametrize("x", [0.5, -0.5])
def test_at_kl_clip_the_gradient_flows_and_beyond_it_is_0(backend, x):
    """k1, and k1 with a weight of 2 under clip_weighted, so that w x is 1 at the bound."""
    beyond = math.nextafter(x, 2 * x)
    estimator = Estimator("k1", kl_clip=0.5)
    assert of_token(backend, estimator, x, 0.0) == [x, 1.0, -1.0]
    assert of_token(backend, estimator, beyond, 0.0) == [x, 0.0, 0.0]
    estimator = Estimator("k1", importance_cap=2.0, kl_clip=1.0, clip_weighted=True)
    assert of_token(backend, estimator, x, 0.0, -5.0) == [2 * x, 2.0, -2.0]
    assert of_token(backend, estimator, beyond, 0.0, -5.0) == [2 * x, 0.0, 0.0]


@pytest.mark.parametrize("limit", [{"log_ratio_clip": 0.5}, {"kl_clip": 0.5}], ids=["x", "value"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_at_a_bound_the_weights_gradient_flows_and_beyond_it_is_0(backend, sign, limit):
    """k1 on policy under clip_weighted: w f' + w f = 1 + x."""
    estimator = Estimator("k1", **limit, clip_weighted=True)
    logprobs = torch.tensor([0.5, math.nextafter(0.5, 1)], dtype=torch.float64) * sign
    zeros = torch.zeros(2, dtype=torch.float64)
    _, (grad, grad_ref) = penalty_and_grads(backend, estimator, logprobs, zeros, logprobs)
    assert grad.tolist() == [1 + sign * 0.5, 0.0]
    assert grad_ref.tolist() == [-1.0, 0.0]


def test_at_importance_cap_the_weights_gradient_flows(backend):
    """k1 under a cap of 1, which is the weight on policy: w f' + w f = 1 + x."""
    logprobs, zeros = (
        torch.full((2,), 0.5, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )
    old_logprobs = torch.tensor([0.5, math.nextafter(0.5, 0)], dtype=torch.float64)
    estimator = Estimator("k1", importance_cap=1.0)
    _, (grad, grad_ref) = penalty_and_grads(backend, estimator, logprobs, zeros, old_logprobs)
    assert grad.tolist() == [1.5, 1.0]
    assert grad_ref.tolist() == [-1.0, -1.0]


# clip_weighted, as NeMo-RL and slime have it


@pytest.mark.grid
@pytest.mark.parametrize("old_logprob", [-100.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("importance", ["differentiable", "detached"])
@pytest.mark.parametrize("gradient", ["value", "k2"])
def test_a_weight_that_is_nan_or_infinite_is_0(backend, gradient, importance, old_logprob):
    """The weight is nan_to_num(w, nan=0, posinf=0). exp(99) is infinite in fp32."""
    estimator = Estimator(
        "k3", gradient=gradient, importance=importance, kl_clip=10, clip_weighted=True
    )
    pair = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.5])
    old_logprobs = torch.tensor([old_logprob, -1.0])
    value, grads = penalty_and_grads(backend, estimator, *pair, old_logprobs)
    alone, grads_alone = penalty_and_grads(
        backend, estimator, *(t[1:] for t in (*pair, old_logprobs))
    )
    assert value.tolist() == [0.0, alone.item()]
    assert [grad.tolist() for grad in grads] == [[0.0, grad.item()] for grad in grads_alone]
    options = {"old_logprobs": old_logprobs, "return_stats": True, "backend": backend}
    _, stats = kl_penalty(*pair, estimator=estimator, **options)
    # exp(-inf) is an ordinary weight of 0
    assert stats.clipped.item() == (0 if old_logprob == torch.inf else 1)


BOUNDED = (
    *({"log_ratio_clip": clip} for clip in (1.3, (0.3, 1.9), (-1.9, -0.3))),
    *({"kl_clip": 0.9, "clip_weighted": on} for on in (False, True)),
    {"linear_tail": 1.1},
    {"log_ratio_clip": (-3.1, 4.3), "linear_tail": 1.7, "kl_clip": 5.3},
)


@every_estimator
def test_any_limit_keeps_value_and_gradient_finite(backend, name):
    """Limits act before exp. Clamping an overflow would give a gradient of 0 times infinity."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for limits, gradient, dtype in itertools.product(BOUNDED, ("value", "k2"), dtypes):
        estimator = Estimator(name, gradient=gradient, **limits)
        logprobs = torch.tensor([1000.0, -1000.0], dtype=dtype)
        for old_logprobs in (None, logprobs - 0.5):
            value, grads = penalty_and_grads(
                backend, estimator, logprobs, torch.zeros_like(logprobs), old_logprobs
            )
            assert all(t.isfinite().all() for t in (value, *grads)), estimator


@pytest.mark.parametrize(
    ("logprob", "ref_logprob", "old_logprob"),
    [(-110.0, -1.0, -1.0), (-96.0, -1.0, -1.0), (-1.0, -1.0, -101.0), (-300.0, -1.0, -1.0)],
)
def test_a_weighted_token_is_finite_where_weight_or_formula_alone_is_not(
    backend, logprob, ref_logprob, old_logprob
):
    """In fp32 exp(-109) is 0 and exp(109) is infinite. Their product is 1, the right weight."""
    tensors = (torch.tensor([number]) for number in (logprob, ref_logprob, old_logprob))
    value, (grad, _) = penalty_and_grads(backend, "k3", *tensors, reduction="token-sum")
    x, log_weight = logprob - ref_logprob, logprob - old_logprob
    weight = math.exp(log_weight)
    expected = math.exp(log_weight - x) + weight * (x - 1)
    assert value.item() == pytest.approx(expected, rel=1e-6)
    assert grad.item() == pytest.approx(weight * x, rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("importance", ["differentiable", "detached"])
@every_estimator
def test_extreme_products_agree_with_the_oracle(backend, name, importance):
    """Formula and weight are beyond fp32's range. Their product or its clip is within it."""
    log_ratio = torch.tensor([-100.0, -90.0, 85.0, 95.0, 100.0, 3.0, -3.0, 70.0])
    log_weight = torch.tensor([-95.0, -85.0, -83.0, -100.0, 20.0, -90.0, 88.0, 95.0])
    estimator = Estimator(name, importance=importance, kl_clip=7.7, clip_weighted=True)
    options = {"estimator": estimator, "old_logprobs": -log_weight}
    assert_agrees(backend, torch.zeros(8), -log_ratio, **options)
