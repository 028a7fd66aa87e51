"""Masks of ones, which CPU kernels read in one loop until another weight comes.

The loop reads contiguous fp32 or bf16 log-probs under a mask of zeros and ones. It finds another
weight only where that weight is, when outputs may be written already.
"""

import itertools
import math

import pytest
import torch
from agreement import all_same_bits, random_inputs, same_bits
from refusals import GOOD_WEIGHTS

import klfast

GROUP, TILE, SEGMENT = 64, 1024, 16_384
LENGTH = SEGMENT + TILE + GROUP + 5
PLACES = {
    "first": 0,
    "end of the first group": GROUP - 1,
    "second tile": TILE,
    "end of the first segment": SEGMENT - 1,
    "second segment": SEGMENT,
    "last group": LENGTH - 1,
}
DTYPES = (torch.float32, torch.bfloat16)
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
every_float = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def outputs_of(tensors, mask, reduction="none", **options):
    """[result, gradients, statistics] of a call in the native backend."""
    leaves = [t.detach().requires_grad_() for t in tensors[:2]]
    options |= {"return_stats": True, "backend": "native"}
    result, stats = klfast.kl_penalty(*leaves, mask, reduction=reduction, **options)
    grads = torch.autograd.grad(result.sum(), leaves[:1], retain_graph=True)
    grads += torch.autograd.grad(result.sum(), leaves)
    return [result.detach(), *grads, *stats]


@every_place
@every_float
@pytest.mark.parametrize("weight", [2.0, 0.5])
def test_one_other_weight_counts_wherever_it_is(dtype, weight, place):
    """It changes no bit of other tokens."""
    tensors = random_inputs((1, LENGTH), dtype)
    mask = (torch.rand(1, LENGTH) < 0.7).float()
    mask[:, place] = 1
    ones = outputs_of(tensors, mask)
    weighted = mask.clone()
    weighted[:, place] = weight
    for mask_dtype in (torch.float32, torch.float16, torch.float64):
        got = outputs_of(tensors, weighted.to(mask_dtype))
        for before, after in zip(ones[:4], got[:4], strict=True):
            expected = before.clone()
            expected[:, place] *= weight  # a power of 2: exact
            assert same_bits(after, expected)
        stats = klfast.KLStats(*got[4:])
        assert stats.length.item() == mask.sum().item() + weight - 1
    x = tensors[0].double() - tensors[1].double()
    exact = weighted.double() * (torch.expm1(-x) + x)
    total = outputs_of(tensors, weighted, reduction="token-mean")[0].item()
    assert total == pytest.approx((exact.sum() / weighted.double().sum()).item(), rel=1e-5)


@every_place
@pytest.mark.parametrize("weight", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_one_bad_weight_is_refused_wherever_it_is(reduction, weight, place):
    tensors = random_inputs((1, LENGTH))
    for mask_dtype in (torch.float32, torch.bfloat16, torch.float64):
        mask = torch.ones(1, LENGTH, dtype=mask_dtype)
        mask[:, place] = weight
        with pytest.raises(ValueError, match=f"mask {GOOD_WEIGHTS}"):
            outputs_of(tensors, mask, reduction=reduction)


@pytest.mark.parametrize("threads", [2, 7])
@every_float
def test_threads_share_a_long_sequence_and_thousands_of_short_ones(dtype, threads, set_num_threads):
    lengths = [3, 0, 1, 64] * 500 + [5 * SEGMENT + 7] + [65, 0, 2] * 500
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tensors = random_inputs((sum(lengths),), dtype)
    keep = torch.rand(sum(lengths)) < 0.7
    results = []
    for count in (1, threads):
        set_num_threads(count)
        results.append(outputs_of(tensors, keep, reduction="seq-mean", cu_seqlens=cu_seqlens))
    assert all_same_bits(*results)
    kept = [piece.sum().item() for piece in keep.split(lengths)]
    assert klfast.KLStats(*results[0][4:]).length.tolist() == kept
