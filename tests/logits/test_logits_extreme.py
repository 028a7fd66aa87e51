"""Logits from 1e10 to the largest number, in both signs. Only differences to the maximum matter."""

import contextlib
import math

import agreement_logits as al
import pytest
import torch
from extreme_logits import (
    assert_divergence,
    assert_tokens,
    from_hidden,
    heights,
    ordinary_rows,
    pairs,
    rows_at,
    rows_with_peaks,
)
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
def test_peaks_beyond_the_guess(backend, direction, dtype, way, seed, has_gpu_kernels):
    """A filler of -infinity makes no logit from a hidden state, where the lowest number does.

    Some rows have one likely token. The random signs of ``wrong`` know no error of ex2.approx.
    """
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
            off = al.OF_ONE_WORD if has_gpu_kernels else 0.0
            assert not al.wrong(backend, "token_logprobs", ("logits",), off=off, **given)
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
