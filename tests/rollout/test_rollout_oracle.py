"""Weights, masks and statistics against exact arithmetic.

The reference is compared on all options. tests/conformance compares the kernels with it. Every
backend is compared where numbers are near 0 or far from it.
"""

import math

import oracle_rollout
import pytest
import torch
from agreement import same_bits
from agreement_rollout import assert_agrees, sampled

import klfast
from klfast import Rejection
from klfast.args.rejection import OVER, STATISTICS

BOUNDS = {  # of a token, between the 10 % and the 90 % quantile of the inputs here
    "ratio": (0.8, 1.3),
    "k1": (-0.35, 0.28),
    "abs": (0.05, 0.31),
    "k2": (0.002, 0.06),
    "k3": (0.002, 0.06),
    "binary_kl": (0.001, 0.05),
    "binary_kl_reverse": (0.001, 0.05),
    "binary_tv": (0.01, 0.08),
    "difference": (-0.05, 0.04),
}
SCALE = {"token": 1, "seq-sum": 8, "seq-mean": 0.8, "seq-max": 1.8, "seq-min": 0.07}
LINEAR = ("abs", "binary_tv")  # in x. The others are quadratic near 0
SIGNED = ("k1", "difference")
WEIGHTS = [None, "token", "sequence", "geometric"]
LIMITS = {
    "cap": {"cap": 1.2},
    "floor": {"floor": 0.8, "cap": None},
    "both": {"floor": 0.9, "cap": 1.1},
    "none": {"cap": None},
}
LENGTHS = [0, 1, 5, 9, 0, 12]


def rule(statistic, over):
    """A rule that some of the inputs here fail."""
    low, high = BOUNDS[statistic]
    if statistic == "ratio":
        power = {"seq-sum": 2, "seq-mean": 0.4, "seq-max": 2, "seq-min": 2}.get(over, 1)
        return Rejection(statistic, over, low=low**power, high=high**power)
    if statistic in SIGNED:
        scale = {"seq-sum": 2, "seq-mean": 0.4}.get(over, 1)
        return Rejection(statistic, over, low=scale * low, high=scale * high)
    power = 1 if statistic in LINEAR or over in ("seq-sum", "seq-mean") else 2
    return Rejection(statistic, over, high=SCALE[over] ** power * high)


def batch(layout):
    """Tensors of a call, (logprobs, rollout_logprobs, mask), and its cu_seqlens."""
    cu_seqlens, shape = None, (5, 7)
    if layout == "packed":
        edges = torch.tensor([0, *LENGTHS]).cumsum(0)
        cu_seqlens, shape = edges.int(), (int(edges[-1]),)
    keep = torch.rand(shape) < 0.7
    if layout == "padded":
        keep[2] = False
    return (*sampled(shape), keep * torch.rand(shape).clamp(min=0.25)), cu_seqlens


@pytest.mark.grid
@pytest.mark.parametrize("normalize", [None, "token", "sequence"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("weight", WEIGHTS[1:])
def test_every_weight(weight, limits, outside, layout, normalize):
    tensors, cu_seqlens = batch(layout)
    options = {"weight": weight, "outside": outside, "normalize": normalize, **limits}
    assert_agrees("reference", *tensors, cu_seqlens=cu_seqlens, **options)


@pytest.mark.grid
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_rule(statistic, over, layout):
    tensors, cu_seqlens = batch(layout)
    reject = rule(statistic, over)
    assert_agrees("reference", *tensors, reject=reject, weight=None, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("spread", [1e-7, 1e-4, 0.02, 3.0, 9.0])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_statistics_near_and_far_from_on_policy(backend, weight, spread):
    """Near on-policy, k3 and chi-square keep their digits."""
    logprobs, rollout_logprobs = sampled((4, 30), spread=spread)
    assert_agrees(backend, logprobs, rollout_logprobs, weight=weight)


ONE_SIDE_OF_1 = {"below": {"cap": 0.9}, "above": {"floor": 1.1}, "from 1": {"floor": 1.0}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [0.1, 0.6])
@pytest.mark.parametrize("limits", (LIMITS | ONE_SIDE_OF_1).values(), ids=LIMITS | ONE_SIDE_OF_1)
def test_limits_on_whole_groups(backend, limits, spread, dtype):
    """The CPU's kernel has a faster way for rows of a multiple of 64 tokens."""
    tensors = sampled((2, 128), dtype, spread=spread)
    for mask in (None, torch.rand(2, 128) < 0.8):
        assert_agrees(backend, *tensors, mask, **limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("x", [-700.0, -45.0, -25.0, -20.5, -20.0, -19.5, 19.5, 20.0, 20.5, 45.0])
def test_statistics_at_the_limit_of_exponentials(backend, x, dtype):
    """k3 is limited above. The others are limited on both sides."""
    rollout = torch.full((1, 3), -0.5, dtype=dtype)
    logprobs = rollout + x * torch.tensor([[1.0, 0.999, 1.001]], dtype=dtype)
    assert_agrees(backend, logprobs, rollout, weight=None, reject=Rejection("k3", high=1e3))


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("per_token", [True, False], ids=["token", "sequence"])
def test_advantages_decide_which_side_is_outward(per_token, statistic):
    tensors, cu_seqlens = batch("packed")
    advantages = torch.randn(tensors[0].shape if per_token else (len(LENGTHS),))
    one_sided = Rejection(statistic, high=BOUNDS[statistic][1], outward_only=True)
    options = {"advantages": advantages, "cu_seqlens": cu_seqlens}
    assert_agrees("reference", *tensors, reject=one_sided, **options)


@pytest.mark.parametrize("pair", [(-16.0, -14.0), (-30.2, -24.6), (-299.0, -19.75), (-0.5, -9.0)])
def test_binary_kl_of_rare_tokens_keeps_its_digits(backend, pair):
    """These digits may decide the sum of a sequence."""
    rules = tuple(Rejection(s, high=1.0) for s in ("binary_kl", "binary_kl_reverse"))
    tensors = [torch.tensor([[number]]) for number in pair]
    found = klfast.rollout_correction(*tensors, reject=rules, backend=backend).stats.rules
    exact = oracle_rollout.rollout_correction(*tensors, reject=rules).rules
    for seen, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(seen.total.double(), truth["total"], rtol=2e-6, atol=1e-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bounds", [{"cap": 1.1}, {"cap": None}, {"cap": 8.0, "outside": "mask"}])
def test_a_weight_does_not_depend_on_its_neighbours(backend, dtype, bounds):
    logprobs, rollout_logprobs = sampled((3, 400), dtype)
    apart = logprobs.clone()
    apart[:, ::37] -= 4
    others = torch.arange(400) % 37 != 0
    weights, weights_apart = (
        klfast.rollout_correction(t, rollout_logprobs, backend=backend, **bounds).weights
        for t in (logprobs, apart)
    )
    assert same_bits(weights[:, others], weights_apart[:, others])
    assert not same_bits(weights, weights_apart)


def test_a_weight_next_to_its_cap_is_that_of_any_neighbours(backend):
    """The log-ratio is the rounded logarithm of the cap."""
    for cap in torch.linspace(1.5, 2.7, 300, dtype=torch.float64).tolist():
        logprobs = torch.zeros(1, 64)
        logprobs[0, 3] = math.log(cap)
        apart = logprobs.clone()
        apart[0, 9] = 3
        weights, weights_apart = (
            klfast.rollout_correction(t, torch.zeros(1, 64), cap=cap, backend=backend).weights
            for t in (logprobs, apart)
        )
        assert weights.max() <= torch.tensor(cap, dtype=torch.float32)
        assert same_bits(weights[0, 3], weights_apart[0, 3])
