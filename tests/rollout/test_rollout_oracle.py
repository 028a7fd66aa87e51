"""Weights, masks and statistics against exact arithmetic, for every option and layout."""

import oracle_rollout
import pytest
import torch
from agreement_rollout import assert_agrees, sampled

import klfast
from klfast import Rejection
from klfast.args.rejection import OVER, STATISTICS

BOUNDS = {  # of a token's number, between the 10 % and the 90 % of the inputs here
    "ratio": (0.8, 1.3),
    "k1": (-0.35, 0.28),
    "abs": (0.05, 0.31),
    "k2": (0.002, 0.06),
    "k3": (0.002, 0.06),
    "binary_kl": (0.001, 0.05),
    "binary_kl_reverse": (0.001, 0.05),
    "binary_tv": (0.01, 0.08),
}
SCALE = {"token": 1, "seq-sum": 8, "seq-mean": 0.8, "seq-max": 1.8, "seq-min": 0.07}
LINEAR = ("abs", "binary_tv")  # in x; the others are quadratic near 0
WEIGHTS = [None, "token", "sequence", "geometric"]
LIMITS = {
    "cap": {"cap": 1.2},
    "floor": {"floor": 0.8, "cap": None},
    "both": {"floor": 0.9, "cap": 1.1},
    "none": {"cap": None},
}
MIXED = (
    Rejection("ratio", low=0.6, high=1.7),
    Rejection("k3", "seq-mean", high=0.06),
    Rejection("ratio", "seq-min", low=0.4),
)
LENGTHS = [0, 1, 5, 9, 0, 12]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def rule(statistic, over):
    """A rule that some of the inputs here fail."""
    low, high = BOUNDS[statistic]
    if statistic == "ratio":
        power = {"seq-sum": 2, "seq-mean": 0.4, "seq-max": 2, "seq-min": 2}.get(over, 1)
        return Rejection(statistic, over, low=low**power, high=high**power)
    if statistic == "k1":
        scale = {"seq-sum": 2, "seq-mean": 0.4}.get(over, 1)
        return Rejection(statistic, over, low=scale * low, high=scale * high)
    power = 1 if statistic in LINEAR or over in ("seq-sum", "seq-mean") else 2
    return Rejection(statistic, over, high=SCALE[over] ** power * high)


def batch(layout, mask_kind, dtype=torch.float32, rollout_dtype=None):
    """Tensors of a call, (logprobs, rollout_logprobs, mask), and its cu_seqlens."""
    cu_seqlens, shape = None, (5, 11)
    if layout == "packed":
        edges = torch.tensor([0, *LENGTHS]).cumsum(0)
        cu_seqlens, shape = edges.int(), (int(edges[-1]),)
    elif layout == "one":
        shape = (23,)
    tensors = sampled(shape, dtype, rollout_dtype)
    keep = torch.rand(shape) < 0.7
    if layout == "padded":
        keep[2] = False
    masks = {
        "none": None,
        "bool": keep,
        "int": keep.long(),
        "float": keep * torch.rand(shape).clamp(min=0.25),
    }
    return (*tensors, masks[mask_kind]), cu_seqlens


@pytest.mark.grid(each="backend")
@pytest.mark.parametrize("mask", ["none", "bool", "int", "float"])
@pytest.mark.parametrize("layout", ["padded", "packed", "one"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_weight(backend, weight, limits, outside, layout, mask):
    tensors, cu_seqlens = batch(layout, mask)
    limits = limits if weight else {}
    assert_agrees(
        backend, *tensors, weight=weight, outside=outside, cu_seqlens=cu_seqlens, **limits
    )


@pytest.mark.grid(each="backend")
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_rule(backend, statistic, over, layout, mask):
    tensors, cu_seqlens = batch(layout, mask)
    assert_agrees(backend, *tensors, reject=rule(statistic, over), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_rule_of_the_grid_rejects_and_keeps(statistic, over):
    """Else the comparison above would say little."""
    pair = sampled((100, 11))
    kept = klfast.rollout_correction(*pair, reject=rule(statistic, over), backend="reference").mask
    assert 0.03 < kept.double().mean() < 0.97


@pytest.mark.grid(each="backend")
@pytest.mark.parametrize("rollout_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_every_dtype(backend, layout, weight, dtype, rollout_dtype):
    tensors, cu_seqlens = batch(layout, "bool", dtype, rollout_dtype)
    assert_agrees(backend, *tensors, weight=weight, reject=MIXED, cu_seqlens=cu_seqlens)


@pytest.mark.grid(each="backend")
@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("layout", ["padded", "packed", "one"])
@pytest.mark.parametrize("weight", WEIGHTS[1:])
def test_every_normalization(backend, weight, layout, mask, normalize, outside):
    tensors, cu_seqlens = batch(layout, mask)
    assert_agrees(
        backend,
        *tensors,
        weight=weight,
        normalize=normalize,
        outside=outside,
        cap=1.2,
        cu_seqlens=cu_seqlens,
    )


@pytest.mark.parametrize("spread", [1e-7, 1e-4, 0.02, 3.0, 9.0])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_statistics_near_and_far_from_on_policy(backend, weight, spread):
    """Near it k3 and chi-square keep their digits."""
    logprobs, rollout_logprobs = sampled((4, 30), spread=spread)
    assert_agrees(backend, logprobs, rollout_logprobs, weight=weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("x", [-700.0, -45.0, -25.0, -20.5, -20.0, -19.5, 19.5, 20.0, 20.5, 45.0])
def test_statistics_at_the_limit_of_exponentials(backend, x, dtype):
    """k3 is limited above alone, the others on both sides."""
    rollout = torch.full((1, 3), -0.5, dtype=dtype)
    logprobs = rollout + x * torch.tensor([[1.0, 0.999, 1.001]], dtype=dtype)
    assert_agrees(backend, logprobs, rollout, weight=None, reject=Rejection("k3", high=1e3))


@pytest.mark.grid(each="backend")
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("per_token", [True, False], ids=["token", "sequence"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_advantages_decide_which_side_is_outward(backend, layout, per_token, statistic):
    (*tensors, mask), cu_seqlens = batch(layout, "bool")
    sequences = tensors[0].shape[0] if cu_seqlens is None else len(LENGTHS)
    advantages = torch.randn(tensors[0].shape if per_token else (sequences,))
    one_sided = Rejection(statistic, high=BOUNDS[statistic][1], outward_only=True)
    assert_agrees(
        backend, *tensors, mask, reject=one_sided, advantages=advantages, cu_seqlens=cu_seqlens
    )


@pytest.mark.parametrize("pair", [(-16.0, -14.0), (-30.2, -24.6), (-299.0, -19.75), (-0.5, -9.0)])
def test_binary_kl_of_rare_tokens_keeps_its_digits(backend, pair):
    """Of which a sum over a sequence may decide."""
    rules = tuple(Rejection(s, high=1.0) for s in ("binary_kl", "binary_kl_reverse"))
    tensors = [torch.tensor([[number]]) for number in pair]
    found = klfast.rollout_correction(*tensors, reject=rules, backend=backend).stats.rules
    exact = oracle_rollout.rollout_correction(*tensors, reject=rules).rules
    for seen, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(seen.total.double(), truth["total"], rtol=2e-6, atol=1e-16)
