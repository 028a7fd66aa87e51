"""What the CUDA kernels of ``rollout_correction`` do with values that nobody has checked, and how
they divide the work.
"""

import itertools

import emulated
import pytest
import torch
from agreement import same_bits
from agreement_rollout import sampled
from garbage import GARBAGE, N

import klfast
from klfast import Rejection
from klfast.rollout.call import rollout_call

WEIGHTS = [None, "token", "sequence", "geometric"]
RULES = (
    Rejection("ratio", low=0.6, high=1.6),
    Rejection("k3", "seq-mean", high=0.045),
    Rejection("binary_tv", "seq-max", high=0.5),
)
every_weight = pytest.mark.parametrize("weight", WEIGHTS)


def correct(logprobs, rollout_logprobs, mask=None, *, cu_seqlens=None, weight="token", rules=()):
    """The op itself, as nothing but Python would check its arguments: weights, mask, table."""
    cap = 1.5 if weight else None
    call = rollout_call(
        logprobs,
        rollout_logprobs,
        mask,
        weight,
        None,
        cap,
        "truncate",
        rules,
        None,
        cu_seqlens,
        None,
    )
    choices, numbers = call.spec.encoded()
    return emulated.ops().rollout_correction(
        logprobs,
        rollout_logprobs,
        mask,
        cu_seqlens,
        None,
        list(choices),
        list(numbers),
        *call.spec.encoded_rules(),
    )


@every_weight
@pytest.mark.parametrize("rules", [(), RULES], ids=["no-rules", "rules"])
@pytest.mark.parametrize("cu_seqlens", GARBAGE.values(), ids=GARBAGE)
def test_kernels_stay_inside_their_bounds_whatever_cu_seqlens_holds(cu_seqlens, rules, weight):
    cu_seqlens = torch.tensor(cu_seqlens)
    weights, mask, table = correct(
        *sampled((N,)), cu_seqlens=cu_seqlens, weight=weight, rules=rules
    )
    assert weights.numel() == (N if weight else 0)
    assert mask.shape == (N,)
    assert table.shape == (23 + 7 * len(rules), cu_seqlens.numel() - 1)


@every_weight
@pytest.mark.parametrize("n", [16, 8192, 30_000])
def test_tokens_after_the_last_sequence_are_zero(n, weight):
    pair = sampled((n,))
    outputs = correct(*pair, cu_seqlens=torch.tensor([0, 5, 12]), weight=weight)
    alone = correct(*pair, cu_seqlens=torch.tensor([0, 5, 12, n]), weight=weight)
    for output, whole in zip(outputs[:2], alone[:2], strict=True):
        assert torch.equal(output[:12], whole[:12])
        assert not output[12:].any()
    assert outputs[1][:12].all()
    assert torch.equal(outputs[2], alone[2][:, :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "shifted"])
@pytest.mark.parametrize("width", [3_000, 9_001])
@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_a_sequence_has_the_same_bits_whether_one_warp_reads_it_or_several(
    weight, width, offset, dtype
):
    """The emulated device is full with 32 segments: beyond, a warp reads one alone."""
    torch.manual_seed(0)
    pair = torch.stack(sampled((33, width + 8), dtype))
    pair[0, :, ::97] -= 3  # far from the others
    pair[0, 1, ::1001] = torch.inf
    mask = torch.rand(33, width + 8) < 0.7
    tensors = [t[:, offset : offset + width] for t in (*pair, mask)]
    many = correct(*tensors, weight=weight, rules=RULES)
    for row in (0, 1, 32):
        one = correct(*(t[row : row + 1] for t in tensors), weight=weight, rules=RULES)
        for found, of_all in zip(one[:2], many[:2], strict=True):
            assert same_bits(found, of_all[row : row + 1].clone())
        assert same_bits(one[2], many[2][:, row : row + 1].clone())


LAYOUTS = {
    "shifted": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t),
    "rows-apart": lambda t: torch.cat([t, t[:, :1]], 1)[:, :-1],
    "every-2nd-column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "weights-for-bools": lambda t: t.long() if t.dtype == torch.bool else t,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1_111, 3_000])
def test_layouts_of_rows_longer_than_a_warp_s_chunks_change_no_bit(width, dtype, layout):
    torch.manual_seed(0)
    tensors = [*sampled((3, width), dtype), torch.rand(3, width) < 0.7]
    tensors[0][:, ::97] -= 3  # far from the others
    plain = correct(*tensors, rules=RULES)
    weights, mask, table = correct(*map(layout, tensors), rules=RULES)
    assert same_bits(weights, plain[0])
    assert torch.equal(mask.bool(), plain[1])
    assert same_bits(table, plain[2])
    cu_seqlens = torch.tensor([0, width, 2 * width, 3 * width])
    packed = correct(*(t.flatten() for t in tensors), cu_seqlens=cu_seqlens, rules=RULES)
    for one, other in zip(packed, plain, strict=True):
        assert same_bits(one.flatten(), other.flatten())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *itertools.product(
            [(2, 20_011), (40, 8_300)], [torch.float32, torch.bfloat16, torch.float64]
        ),
        ((300, 8_193), torch.bfloat16),  # one dtype, for its time
    ],
    ids=str,
)
@pytest.mark.parametrize("weight", ["token", "geometric"])
def test_long_sequences_are_those_of_the_cpu(weight, shape, dtype):
    """Of several segments, which the last block adds."""
    pair = sampled(shape, dtype)
    mask = torch.rand(shape) < 0.7
    found = correct(*pair, mask, weight=weight, rules=RULES[:2])
    expected = klfast.rollout_correction(
        *pair, mask, weight=weight, cap=1.5, reject=RULES[:2], backend="reference"
    )
    torch.testing.assert_close(found[0], expected.weights, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1], expected.mask)
    table = klfast.RolloutStats.of_table(found[2])
    for name in klfast.RolloutStats._fields[:-1]:
        torch.testing.assert_close(
            getattr(table, name), getattr(expected.stats, name), rtol=1e-5, atol=1e-2
        )
    for seen, exact in zip(table.rules, expected.stats.rules, strict=True):
        for one, other in zip(seen, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-2)


def test_forty_rules():
    rules = tuple(
        Rejection(statistic, over, high=2.0)
        for statistic in ("k1", "abs", "k2", "k3", "binary_kl", "binary_kl_reverse", "binary_tv")
        for over in ("token", "seq-sum", "seq-mean", "seq-max", "seq-min")
    ) + tuple(Rejection("ratio", over, high=2.0) for over in ("token", "seq-sum", "seq-mean"))
    pair = sampled((3, 9_000))
    found = correct(*pair, rules=rules)
    expected = klfast.rollout_correction(*pair, cap=1.5, reject=rules, backend="reference")
    assert torch.equal(found[1], expected.mask)
    seen = klfast.RolloutStats.of_table(found[2]).rules
    for one, other in zip(seen, expected.stats.rules, strict=True):
        torch.testing.assert_close(one.total, other.total, rtol=1e-5, atol=1e-3)
        assert torch.equal(one.above, other.above)
