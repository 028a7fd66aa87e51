"""Logits from 1e10 to the largest number, in both signs. Only differences to the maximum matter."""

import contextlib
import math

import agreement_logits as al
import mpmath
import pytest
import torch
from extreme_logits import (
    EXTREME,
    assert_divergence,
    assert_tokens,
    from_hidden,
    heights,
    ordinary_rows,
    pairs,
    rows_at,
    rows_with_peaks,
)
from mpmath import mpf
from shards import over_shards

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")
LOWEST = torch.finfo(torch.float32).min

exhaustive = pytest.mark.exhaustive
every_dtype = pytest.mark.parametrize("dtype", al.FLOATS, ids=str)


@pytest.mark.grid(meet=1)
@every_dtype
@al.every_direction
def test_divergences(backend, direction, dtype):
    assert_divergence(backend, *pairs(7, dtype), direction)


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("temperature", [0.3, 7.0, 1e9])
@al.every_direction
def test_temperatures(backend, direction, temperature):
    assert_divergence(backend, *pairs(7, torch.float32), direction, temperature)


@pytest.mark.parametrize("backend", al.FAST, indirect=True)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.exhaustive), 7])
@al.every_direction
def test_the_greatest_is_beyond_the_first_look(backend, direction, step):
    """Every ``step``-th pair runs, which includes every height."""
    assert_divergence(backend, *(t[::step] for t in pairs(3000, torch.float32)), direction)


BY_WAY_OF = {
    "logits": (None, ()),
    "hidden states": (from_hidden, ()),
    "two shards": (None, (700,)),
    "three shards": (None, (64, 1100)),
}
"""The function, and the edges of the shards."""


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", BY_WAY_OF)
@every_dtype
@al.every_direction
def test_peaks_beyond_the_guess(backend, direction, dtype, way, seed):
    """A filler of -infinity makes no logit from a hidden state, where the lowest number does."""
    function, edges = BY_WAY_OF[way]
    if edges and direction not in ("reverse", "forward"):
        pytest.skip("is no sum over shards")
    torch.manual_seed(seed)
    lowest = torch.finfo(dtype).min if function else -math.inf
    models = rows_with_peaks(1600, dtype, lowest)
    with over_shards(edges) if edges else contextlib.nullcontext():
        assert_divergence(backend, *models, direction, function=function, shards=len(edges) > 0)
    if way == "logits":
        assert_tokens(backend, models[0], models[1].argmax(-1))
        top = models[1].double().log_softmax(-1).topk(50)
        given = {"logits": models[0], "token_ids": top.indices, "return_entropy": True}
        if dtype != torch.float64:  # where ``wrong`` omits the rounding of a log-sum-exp of 1,000
            assert not al.wrong(backend, "token_logprobs", ("logits",), **given)
        given = {"logits": models[0], "ref_token_ids": top.indices, "ref_logprobs": top.values}
        assert not al.wrong(backend, "topk_kl_divergence", (), direction=direction, **given)


@every_dtype
def test_tokens(backend, dtype):
    rows = [rows_at(height, 7, dtype) for height in heights(dtype)]
    logits = torch.cat([*rows, ordinary_rows(7, dtype)])
    for ids in (logits.argmax(-1), torch.arange(len(logits)) % 7):
        for temperature in (1.0, 0.3, 1e9):
            assert_tokens(backend, logits, ids, temperature)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("lowest", [-1e7, -1e9, -1e30, -2e38, LOWEST])
def test_a_word_that_one_model_leaves_out_has_no_gradient(backend, lowest, both):
    """Its log-ratio may overflow when the incoming gradient multiplies it."""
    logits, ref_logits = torch.zeros(2, 1, 1, 4096)
    logits[0, 0, 3] = lowest
    logits.requires_grad_()
    ref_logits.requires_grad_(both)
    kl = klfast.kl_divergence(logits, ref_logits, reduction="none", backend=backend)
    kl.backward(torch.full_like(kl, 8.0))
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0, 3] == 0


HAND_MADE = {
    "10,000 against the lowest": ([1e4, 0, 0, 0], [LOWEST] * 4, math.log(4), 7500 - math.log(4)),
    "highest against the lowest": ([-LOWEST, 0, 1, 2], [LOWEST] * 4, math.log(4), -0.75 * LOWEST),
    "two against one": ([1e14, 1e14, 0], [1e14, 0, -math.inf], math.inf, math.log(2)),
    "a constant apart": ([1e20, 1e20], [-1e30, -1e30], 0, 0),
}


@pytest.mark.parametrize(("x", "y", "reverse", "forward"), HAND_MADE.values(), ids=HAND_MADE)
def test_by_hand(backend, x, y, reverse, forward):
    models = torch.tensor([x]), torch.tensor([y])
    for direction, expected in (("reverse", reverse), ("forward", forward)):
        found = klfast.kl_divergence(*models, direction=direction, backend=backend)
        assert found.item() == pytest.approx(expected, rel=1e-6, abs=0)


def exact_model(row, temperature):
    """(probabilities, their logarithms)."""
    exact = [mpf(x) for x in row]
    shifted = [(x - max(exact)) / mpf(temperature) for x in exact]
    total = mpmath.fsum(map(mpmath.exp, shifted))
    return [mpmath.exp(x) / total for x in shifted], [x - mpmath.log(total) for x in shifted]


def slopes_of(direction, p, q, log_p, log_q):
    """(p dd/dp, q dd/dq) of an entry, where a divergence is the sum of d(p, q)."""
    if p + q == 0:
        return mpf(0), mpf(0)
    if direction == "tv":
        return p * mpmath.sign(p - q) / 2, q * mpmath.sign(q - p) / 2

    def kl(x, of_x, log_x, log_m):  # x log(x / m) with m = of_x x + ...
        share = of_x * mpmath.exp(log_x - log_m) if x and of_x else 0
        return (x * (log_x - log_m + 1 - share) if x else mpf(0)), share

    if direction == "reverse":
        return kl(p, 0, log_p, log_q)[0], -p
    of_p = {"jsd": mpf(1) / 2, "skew-reverse": mpf(0.1)}[direction]
    log_m = mpmath.log(of_p * p + (1 - of_p) * q)
    if direction == "jsd":
        return tuple(x * (log - log_m) / 2 if x else mpf(0) for x, log in ((p, log_p), (q, log_q)))
    slope, share = kl(p, of_p, log_p, log_m)
    return slope, -p * (1 - share)


def exact_divergence(direction, *models):
    """The divergence of two models (p, log p), and the gradients of their logits."""
    if "forward" in direction:
        value, grads = exact_divergence(direction.replace("forward", "reverse"), *models[::-1])
        return value, grads[::-1]
    (p, log_p), (q, log_q) = models
    slopes = [slopes_of(direction, *of) for of in zip(p, q, log_p, log_q, strict=True)]
    slopes = [*zip(*slopes, strict=True)]
    sums = [mpmath.fsum(of) for of in slopes]
    grads = [
        [slope - own * total for slope, own in zip(of, model, strict=True)]
        for of, total, model in zip(slopes, sums, (p, q), strict=True)
    ]
    return sum(sums), grads  # Euler's theorem: d is homogeneous of degree 1


@al.every_direction
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.exhaustive), 4.0])
def test_the_reference_is_exact(direction, temperature):
    """At 1,300 bits every difference of two fp32 logits is exact."""
    models = al.leaves(*(t[::3].double() for t in pairs(4, torch.float32)))
    options = {"direction": direction, "temperature": temperature, "backend": "reference"}
    found = klfast.kl_divergence(*models, token_ids=models[0].argmin(-1), **options)
    grads = torch.autograd.grad(found.kl.sum(), models)
    columns = (t.tolist() for t in (*models, models[0].argmin(-1), *found[:2], *grads))
    with mpmath.workprec(1300):
        for x, y, token_id, kl, logprob, *of_models in zip(*columns, strict=True):
            both = [exact_model(row, temperature) for row in (x, y)]
            value, exact = exact_divergence(direction, *both)
            assert kl == pytest.approx(float(value), rel=1e-12, abs=1e-14)
            assert logprob == pytest.approx(float(both[0][1][token_id]), rel=1e-12)
            for found_of, exact_of in zip(of_models, exact, strict=True):
                scaled = [float(g / temperature) for g in exact_of]
                assert value == mpmath.inf or found_of == pytest.approx(
                    scaled, rel=1e-11, abs=1e-14 * max(1, float(value))
                )
    assert len({*heights(torch.float32)}) == 2 * len(EXTREME)
