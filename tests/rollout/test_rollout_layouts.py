"""Strides, padding, packing and sizes change no bit; neither does what else is in the batch."""

import pytest
import torch
from agreement import same_bits
from agreement_rollout import sampled
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection

RULES = (
    Rejection("ratio", low=0.6, high=1.6),
    Rejection("k3", "seq-mean", high=0.045),
    Rejection("ratio", "seq-min", low=0.4),
    Rejection("binary_kl", "seq-sum", high=0.6),
)
WEIGHTS = [None, "token", "sequence", "geometric"]
every_weight = pytest.mark.parametrize("weight", WEIGHTS)


def in_buffer(tensor, offset):
    buffer = torch.full((tensor.numel() + offset + 1,), 9).to(tensor.dtype)
    buffer[offset : offset + tensor.numel()] = tensor.flatten()
    return buffer[offset : offset + tensor.numel()].view_as(tensor)


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every-2nd-column": lambda t: t.repeat_interleave(2, 1)[:, 1::2],
    "middle-columns": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "one-row": lambda t: t[:1].expand_as(t),
    "one-number": lambda t: t[0, 0].expand_as(t),
    "overlapping-rows": lambda t: t.flatten().as_strided(t.shape, (1, 1)),
    "offset-3": lambda t: in_buffer(t, 3),
}


def correct(backend, *tensors, weight="token", **options):
    result = klfast.rollout_correction(
        *tensors, weight=weight, reject=RULES, backend=backend, **options
    )
    return [leaf for leaf in tree_leaves(result) if leaf is not None]


def per_token(result):
    """The weights and the mask, and then the statistics."""
    tokens = [leaf for leaf in result if leaf.dim() == 2 or leaf.dtype == torch.bool]
    return tokens, result[len(tokens) :]


def assert_same(results, others):
    assert all(same_bits(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("argument", [0, 1, 2, None])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_may_have_any_layout(backend, dtype, layout, argument):
    tensors = *sampled((3, 70), dtype), torch.rand(3, 70) < 0.8
    laid_out = [layout(t) if argument in (i, None) else t for i, t in enumerate(tensors)]
    plain = [t.contiguous() for t in laid_out]
    assert_same(correct(backend, *laid_out), correct(backend, *plain))


@every_weight
def test_padding_and_other_sequences_change_no_bit(backend, weight):
    tensors = *sampled((4, 50)), torch.rand(4, 50) < 0.8
    tensors[2][:, 40:] = False
    tokens, stats = per_token(correct(backend, *tensors, weight=weight))
    cut = [t[1:3, :40] for t in tensors]
    cut_tokens, cut_stats = per_token(correct(backend, *cut, weight=weight))
    assert_same(cut_tokens, [t[1:3, :40].clone() for t in tokens])
    assert_same(cut_stats, [t[1:3].clone() for t in stats])


@every_weight
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_packed_and_padded_have_the_same_bits(backend, index, weight):
    lengths = torch.tensor([7, 0, 30, 1])
    keep = torch.arange(30) < lengths[:, None]
    tensors = sampled((4, 30))
    tokens, stats = per_token(correct(backend, *tensors, keep, weight=weight))
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(index)
    packed = [t[keep] for t in tensors]
    result = correct(backend, *packed, weight=weight, cu_seqlens=cu_seqlens)
    assert_same(result[: len(tokens)], [t[keep] for t in tokens])
    assert_same(result[len(tokens) :], stats)


@every_weight
def test_more_tokens_than_a_16_bit_index_counts(backend, weight):
    """Only the last of 65,537 is kept, so it alone is every number."""
    tokens = 2**16 + 1
    mask = torch.zeros(2, tokens, dtype=torch.bool)
    mask[1, -1] = True
    logprobs = torch.full((2, tokens), torch.nan)
    logprobs[1, -1] = -1.5
    weights, kept, stats = klfast.rollout_correction(
        logprobs, torch.full((2, tokens), -1.0), mask, weight=weight, backend=backend
    )
    assert torch.equal(kept, mask)
    assert stats.k1.tolist() == [0, -0.5]
    if weights is not None:
        expected = torch.zeros(2, tokens)
        expected[1, -1] = torch.tensor(-0.5).exp()
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


def test_many_tokens_sum_in_fixed_order(backend):
    pair = sampled((1, 2**16 + 11))
    assert_same(correct(backend, *pair), correct(backend, *pair))
    twice = [torch.cat([t, t]) for t in pair]
    _, stats = per_token(correct(backend, *twice))
    assert_same([t[:1].clone() for t in stats], [t[1:].clone() for t in stats])


def test_inputs_are_left_as_they_are(backend):
    tensors = *sampled((3, 20)), torch.rand(3, 20) < 0.8
    before = [t.clone() for t in tensors]
    correct(backend, *tensors, normalize="token")
    assert_same(tensors, before)
