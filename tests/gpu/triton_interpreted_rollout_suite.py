"""What ``test_triton_interpreted`` runs of ``rollout_correction`` beside tests of every backend.

Bits, bounds, seams between tiles and segments, several launches, and the digits of the formulas.
"""

import math

import oracle
import oracle_rollout
import pytest
import torch
import triton
import triton.language as tl
from agreement import same_bits
from agreement_rollout import sampled
from garbage import BAD_EDGES
from mpmath import mpf
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection
from klfast.backends.triton import rollout_launch as launch
from klfast.backends.triton.rollout_tokens import saturated, statistic, two_events
from klfast.rollout.call import RolloutCall, rollout_call

BACKEND = "triton"
SEAMS = (1, 513, 4096, 4097)
"""Around tiles of 512 and segments of 4096 tokens."""
RULES = (
    Rejection("ratio", low=0.6, high=1.6),
    Rejection("binary_kl", high=0.05, outward_only=True),
    Rejection("k3", "seq-mean", high=0.045),
    Rejection("abs", "seq-max", high=1.0),
)
NINE = (
    *RULES,
    Rejection("k1", "seq-sum", low=-3, high=3),
    Rejection("binary_tv", high=0.1),
    Rejection("ratio", "seq-min", low=0.3),
    Rejection("k2", high=0.1),
    Rejection("binary_kl_reverse", "seq-mean", high=0.1),
)


def correct(logprobs, rollout_logprobs, mask, advantages, **options):
    """(weights, mask, all statistics)."""
    options = {"reject": RULES, "advantages": advantages, "backend": BACKEND} | options
    weights, kept, stats = klfast.rollout_correction(logprobs, rollout_logprobs, mask, **options)
    return weights, kept, tree_leaves(stats)


def inputs(shape, dtype=torch.float32, fractions=True):
    """(logprobs, rollout_logprobs, mask, advantages), with some tokens that are not finite."""
    logprobs, rollout_logprobs = sampled(shape, dtype)
    logprobs[torch.rand(shape) < 0.1] = -math.inf
    mask = torch.rand(shape) < 0.8
    if fractions:
        mask = mask * torch.rand(shape).clamp(min=0.25)
    return logprobs, rollout_logprobs, mask, torch.randn(shape)


@pytest.mark.parametrize(
    "weight", ["token", pytest.param("geometric", marks=pytest.mark.exhaustive)]
)
def test_a_sequence_is_the_same_alone_padded_packed_and_strided(weight):
    sequences = [inputs((n,)) for n in SEAMS]
    width = max(SEAMS) + 5
    pad = [[torch.nn.functional.pad(t, (0, width - len(t))) for t in s] for s in sequences]
    columns = [torch.stack(column) for column in zip(*pad, strict=True)]
    edges = torch.tensor([0, *SEAMS]).cumsum(0)
    together = [
        correct(*columns, weight=weight),
        correct(*[t.t().contiguous().t() for t in columns], weight=weight),
        correct(
            *[torch.cat(column) for column in zip(*sequences, strict=True)],
            weight=weight,
            cu_seqlens=edges,
        ),
    ]
    for s, sequence in enumerate(sequences):
        weights, kept, stats = correct(*sequence, weight=weight)
        padded, packed = (s, slice(SEAMS[s])), slice(edges[s], edges[s + 1])
        for other, tokens in zip(together, (padded, padded, packed), strict=True):
            assert same_bits(weights, other[0][tokens])
            assert same_bits(kept, other[1][tokens])
            assert all(same_bits(a, b[s : s + 1]) for a, b in zip(stats, other[2], strict=True))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weight", [None, "token", "sequence"])
@pytest.mark.parametrize("fractions", [True, False])
def test_rules_of_several_launches_are_as_if_each_were_alone(weight, fractions, dtype):
    tensors = inputs((5, 20), dtype, fractions)
    weights, kept, stats = klfast.rollout_correction(
        *tensors[:3], weight=weight, reject=NINE, advantages=tensors[3], backend=BACKEND
    )
    expected = tensors[2]
    for rule, seen in zip(NINE, stats.rules, strict=True):
        advantages = tensors[3] if rule.outward_only else None
        alone = klfast.rollout_correction(
            *tensors[:3], weight=weight, reject=rule, advantages=advantages, backend=BACKEND
        )
        assert weight is None or same_bits(weights, alone.weights)
        assert all(same_bits(a, b) for a, b in zip(seen, alone.stats.rules[0], strict=True))
        expected = torch.where(alone.mask != 0, expected, torch.zeros_like(expected))
        for name in set(stats._fields) - {"kept", "rejected", "rules"}:
            assert same_bits(getattr(stats, name), getattr(alone.stats, name)), name
    assert torch.equal(kept, expected)
    assert 0 < (kept != 0).sum() < (tensors[2] != 0).sum()
    torch.testing.assert_close(stats.kept, kept.to(dtype).sum(1))
    assert torch.equal(stats.rejected, ((tensors[2] != 0) & (kept == 0)).sum(1).to(dtype))


def arguments(call: RolloutCall):
    """The arguments of the op."""
    choices, numbers = call.spec.encoded()
    return (
        call.logprobs,
        call.rollout_logprobs,
        call.layout.mask,
        call.layout.cu_seqlens,
        call.advantages,
        list(choices),
        list(numbers),
        *call.spec.encoded_rules(),
    )


def op(call: RolloutCall):
    """The op itself, which looks at no value."""
    return launch.rollout_correction(*arguments(call))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("weight", ["none", "token", "geometric"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_torch_sees_the_op_as_it_is(packed, weight):
    """Schema, shapes for tracing, no argument among the results."""
    logprobs, rollout_logprobs, mask, advantages = inputs((12,) if packed else (3, 4))
    call = rollout_call(
        logprobs,
        rollout_logprobs,
        mask,
        None if weight == "none" else weight,
        None,
        None if weight == "none" else 2.0,
        "truncate",
        RULES,
        None,
        torch.tensor([0, 5, 12]) if packed else None,
        advantages,
    )
    torch.library.opcheck(torch.ops.klfast_triton.rollout_correction.default, arguments(call))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("edges", BAD_EDGES.values(), ids=BAD_EDGES)
@pytest.mark.parametrize("mask", [None, torch.int8, torch.float64], ids=str)
@pytest.mark.parametrize("weight", [None, "token", "sequence"])
def test_no_cu_seqlens_leads_out_of_bounds(monkeypatch, weight, mask, edges):
    """Every output lies between sentinels; the op does not look at what cu_seqlens holds."""
    guarded = []

    def between_sentinels(shape, *, dtype, device):
        buffer = torch.full((math.prod(shape) + 128,), 77, device=device).to(dtype)
        guarded.append(buffer)
        return buffer[64 : buffer.numel() - 64].view(shape)

    given = None if mask is None else torch.ones(9, dtype=mask)
    advantages = torch.ones(len(edges) - 1)
    limits = (None, None) if weight is None else (None, 2.0)
    call = rollout_call(
        *sampled((9,)), given, weight, *limits, "truncate", NINE, None, torch.tensor(edges),
        advantages,
    )  # fmt: skip
    monkeypatch.setattr(launch.torch, "empty", between_sentinels)
    op(call)
    assert guarded
    for buffer in guarded:
        ends = torch.cat([buffer[:64], buffer[-64:]])
        assert (ends == torch.tensor(77).to(buffer.dtype)).all()


@pytest.mark.parametrize("edges", [[0, 5, 12], [0]], ids=["short", "no-sequence"])
@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_tokens_after_the_last_sequence_are_zero(weight, edges):
    """A packed buffer that is longer than its sequences, with numbers that nothing masks."""
    end = edges[-1]
    call = rollout_call(
        *sampled((1500,)), None, weight, None, 2.0, "truncate", (), None, torch.tensor(edges), None
    )
    weights, kept, _ = op(call)
    for per_token in (weights, kept):
        assert per_token[:end].all()
        assert not per_token[end:].any()


@pytest.mark.parametrize("weight", [None, "token", "sequence"])
def test_no_extreme_is_a_negative_zero(weight):
    """Of sequences without a token, of none that is finite, and of x = -0."""
    logprobs = torch.tensor([[-1.0], [-math.inf], [-0.0]])
    rollout_logprobs = torch.tensor([[-1.0], [-1.0], [0.0]])
    mask = torch.tensor([[0], [1], [1]])
    rules = [Rejection("k1", over, low=-1) for over in ("token", "seq-max", "seq-min")]
    stats = klfast.rollout_correction(
        logprobs, rollout_logprobs, mask, weight=weight, reject=rules, backend=BACKEND
    ).stats
    for leaf in tree_leaves(stats):
        assert not torch.signbit(leaf[:2]).any()
    assert not torch.signbit(stats.min_log_ratio).any()
    assert not torch.signbit(stats.max_log_ratio).any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", [1e-12, 0.3, 1.1, 3.0, 1e12])
@pytest.mark.parametrize("side", ["floor", "cap"])
def test_a_truncated_weight_is_the_bound_itself(side, bound, level):
    """And no weight is beyond it, however near the log is; exponentials end at 20 nats."""
    x = torch.tensor([bound]).log() + torch.linspace(-1e-6, 1e-6, 9) * max(1, abs(math.log(bound)))
    x = torch.cat([x, torch.tensor([-40.0, -1.0, 0.0, 1.0, 40.0])])[:, None]
    limits = {"floor": None, "cap": None} | {side: bound}
    weights = klfast.rollout_correction(
        x, torch.zeros_like(x), weight=level, backend=BACKEND, **limits
    ).weights
    is_cap = side == "cap"
    is_beyond = x.double() > math.log(bound) if is_cap else x.double() < math.log(bound)
    nearest = min(bound, math.exp(20)) if is_cap else max(bound, math.exp(-20))
    expected = torch.full_like(weights, nearest)
    torch.testing.assert_close(weights[is_beyond], expected[is_beyond], rtol=1e-6, atol=0)
    if nearest == bound:
        assert (weights <= expected if is_cap else weights >= expected).all()
        if level == "sequence":  # a token's x is compared in fp32
            assert torch.equal(weights[is_beyond], expected[is_beyond])


LOGS = (-1e-6, -1e-4, -0.01, -0.1, -0.7, -1.0, -3.0, -8.0, -20.0)
APART = (1e-6, 1e-4, 0.01, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 5.0, 15.0, 60.0)


@triton.jit
def statistic_kernel(a, b, values, FORMULAS: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 256)
    a, b = tl.load(a + at), tl.load(b + at)
    _, _, k3 = saturated(a - b)
    tl.store(values + at, statistic(a - b, k3, two_events(a, b), FORMULAS, 0))


@pytest.mark.parametrize("name", ["binary_kl", "binary_kl_reverse", "binary_tv", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_statistics_keep_their_digits(dtype, name):
    """Near p = q and far from it. Of what a difference in them subtracts, a fifth is left at least:
    four times the promise.
    """
    pairs = [(b + x, b) for b in LOGS for d in APART for x in (d, -d) if b + x < -1e-7]
    pairs += [(-1.0, -1.0)] * (256 - len(pairs))
    logprobs, rollout_logprobs = torch.tensor(pairs, dtype=torch.float64).to(dtype).T.contiguous()
    values = torch.empty_like(logprobs)
    statistic_kernel[(1,)](logprobs, rollout_logprobs, values, (name,))
    for value, a, b in zip(
        *map(torch.Tensor.tolist, (values, logprobs, rollout_logprobs)), strict=True
    ):
        exact = oracle_rollout.STATISTICS[name](oracle_rollout.Token(mpf(a), mpf(b), 1.0))
        allowed = 4 * oracle.promise(1, dtype) * exact + torch.finfo(dtype).tiny
        assert abs(mpf(value) - exact) <= allowed, (a, b, value, exact)


@pytest.mark.parametrize("at", ["same", "p-is-1", "q-is-1", "both-are-1", "p-is-0", "q-is-0"])
@pytest.mark.parametrize("statistic", ["binary_kl", "binary_kl_reverse", "binary_tv"])
def test_statistics_at_their_limits_are_as_stated(statistic, at):
    """Complements are 1e-8 at least, probabilities 1 at most."""
    a, b = {
        "same": (-0.5, -0.5),
        "p-is-1": (0.5, -0.3),
        "q-is-1": (-0.3, 0.0),
        "both-are-1": (-1e-10, 1.0),
        "p-is-0": (-3e38, -0.3),
        "q-is-0": (-0.3, -3e38),
    }[at]
    pair = torch.tensor([a]), torch.tensor([b])
    values = [
        klfast.rollout_correction(*pair, reject=Rejection(statistic, high=1), backend=backend)
        .stats.rules[0]
        .total
        for backend in (BACKEND, "reference")
    ]
    torch.testing.assert_close(*values, rtol=1e-6, atol=0)
