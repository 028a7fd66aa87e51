"""What must not change a bit: neighbours that take another formula, a mask's dtype, threads."""

import math

import pytest
import torch
from agreement import same_bits
from agreement_rollout import sampled
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection

RULES = (Rejection("k3", high=0.3), Rejection("k1", "seq-mean", low=-0.4, high=0.4))
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_weight = pytest.mark.parametrize("weight", [None, "token", "sequence", "geometric"])


def leaves(*tensors, **options):
    result = klfast.rollout_correction(*tensors, reject=RULES, **options)
    return [leaf for leaf in tree_leaves(result) if leaf is not None]


def assert_same(results, others):
    assert all(same_bits(a, b) for a, b in zip(results, others, strict=True))


@every_dtype
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


@every_weight
def test_no_mask_keeps_all(backend, weight):
    pair = sampled((3, 300))
    options = {"backend": backend, "weight": weight}
    assert_same(leaves(*pair, **options), leaves(*pair, torch.ones(3, 300).bool(), **options))


@every_weight
@every_dtype
def test_threads_change_nothing(backend, weight, dtype, set_num_threads):
    """More than one part of a batch, and sequences of several segments."""
    pair, mask = sampled((3, 40_000), dtype), torch.rand(3, 40_000) < 0.8
    options = {"backend": backend, "weight": weight}
    set_num_threads(1)
    alone = leaves(*pair, mask, **options)
    for threads in (2, 5):
        set_num_threads(threads)
        assert_same(leaves(*pair, mask, **options), alone)


@every_weight
def test_a_long_sequence_is_the_same_packed_padded_and_alone(backend, weight):
    pair = sampled((2, 40_000))
    options = {"backend": backend, "weight": weight}
    padded = leaves(*pair, **options)
    cu_seqlens = torch.tensor([0, 40_000, 40_000, 80_000])
    packed = leaves(*(t.flatten() for t in pair), cu_seqlens=cu_seqlens, **options)
    alone = leaves(*(t[1] for t in pair), **options)
    for a, b, c in zip(padded, packed, alone, strict=True):
        of_sequences = b[[0, 2]] if b.shape == (3,) else b.view(2, -1)
        assert same_bits(a, of_sequences.contiguous())
        assert same_bits(a[1].clone(), c.view(a[1].shape))


def test_a_weight_next_to_its_cap_is_that_of_any_neighbours(backend):
    """At a log-ratio that is the rounded logarithm of the cap."""
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
