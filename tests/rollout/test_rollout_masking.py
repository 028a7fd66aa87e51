"""A masked token does not exist. A kept token that is not finite is counted and rejected."""

import itertools
import math

import oracle_rollout
import pytest
import torch
from agreement import same_bits
from agreement_rollout import sampled
from every_function import tensors_of
from masked import POISON, last_alone
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection
from klfast.args.rejection import OVER, STATISTICS

SHAPE = (4, 30)
RULES = tuple(Rejection(statistic, over, high=1.5) for statistic in STATISTICS for over in OVER)
WEIGHTS = [None, "token", "sequence", "geometric"]

every_poison = pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
every_weight = pytest.mark.parametrize("weight", WEIGHTS)


def inputs():
    """(logprobs, rollout_logprobs, keep) with a fully masked second sequence."""
    keep = torch.rand(SHAPE) < 0.6
    keep[1] = False
    return *sampled(SHAPE), keep


def test_a_mask_that_keeps_nothing(backend):
    logprobs, rollout_logprobs, keep = inputs()
    for weight in WEIGHTS[1:]:
        for normalize in (None, "token", "sequence"):
            weights, mask, stats = klfast.rollout_correction(
                logprobs * math.nan,
                rollout_logprobs,
                torch.zeros_like(keep),
                weight=weight,
                normalize=normalize,
                reject=RULES,
                backend=backend,
            )
            assert torch.equal(weights, torch.zeros(SHAPE))
            assert not mask.any()
            assert all((leaf == 0).all() for leaf in tree_leaves(stats))
            assert all(value == 0 for value in stats.as_dict().values())


def test_micro_batches_have_the_statistics_of_the_batch(backend):
    batch, options = inputs(), {"reject": RULES, "backend": backend}
    whole = klfast.rollout_correction(*batch, **options).stats
    halves = [t.split([1, 3]) for t in batch]
    parts = [
        klfast.rollout_correction(*part, **options).stats for part in zip(*halves, strict=True)
    ]
    assert same_bits((parts[0] + parts[1]).table(), whole.table())
    assert same_bits(klfast.RolloutStats.cat(parts).table(), whole.table())
    with pytest.raises(ValueError, match=r"must have the same rules, got \[0, 45\] of them"):
        whole + whole._replace(rules=())
    with pytest.raises(TypeError):
        whole + parts[0].rules


@every_poison
@pytest.mark.parametrize("side", [0, 1], ids=["logprobs", "rollout_logprobs"])
@every_weight
def test_a_kept_token_that_is_not_finite_is_counted_and_rejected(backend, weight, side, poison):
    """It is in no sum. All else is as if its x were 0, in a longer sequence."""
    *pair, keep = inputs()
    keep[2, 5] = True
    pair[side][2, 5] = poison
    weights, mask, stats = klfast.rollout_correction(
        *pair, keep, weight=weight, reject=RULES[0], backend=backend
    )
    assert stats.nonfinite.tolist() == [0, 0, 1, 0]
    assert stats.tokens.tolist() == keep.sum(1).tolist()
    is_excluded = poison == -math.inf if side == 0 else poison == math.inf  # x is -inf
    weighs_excluded = is_excluded and weight in ("sequence", "geometric")
    assert not mask[2, 5]
    weight_there = None if weights is None else weights[2, 5].item()
    assert weight_there in (None, pytest.approx(weighs_excluded * math.exp(-20), 1e-6))
    assert all(leaf.isfinite().all() for leaf in tensors_of((weights, stats)))
    assert all(value.isfinite() for value in stats.as_dict().values())

    zeroed = [t.clone() for t in pair]
    for t in zeroed:
        t[2, 5] = 0
    clean = klfast.rollout_correction(
        *zeroed, keep, weight=weight, reject=RULES[0], backend=backend
    )
    others = keep.clone()
    others[2, 5] = False
    assert torch.equal(mask[others], clean.mask[others])
    if weight == "geometric" and not weighs_excluded:  # its mean is over the other tokens
        left_out = klfast.rollout_correction(*pair, others, weight=weight, backend=backend)
        torch.testing.assert_close(weights, left_out.weights, rtol=1e-6, atol=0.0)
    elif weights is not None and not weighs_excluded:
        assert same_bits(weights[others], clean.weights[others])
    for name in ("length", "tokens", "logprobs", "k1", "k2", "k3", "abs", "chi2", "error"):
        # A kernel may add its neighbours by another formula.
        torch.testing.assert_close(
            getattr(stats, name), getattr(clean.stats, name), rtol=1e-6, atol=1e-6
        )


@pytest.mark.grid(each="backend")
@pytest.mark.parametrize("pair", [(-math.inf, -1.0), (-math.inf, -1e4), (-1.0, math.inf)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("over", OVER[1:])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.filterwarnings("ignore:klfast.rollout_correction. rollout_logprobs must hold")
def test_a_sequence_sees_that_the_policy_excludes_a_token(
    backend, statistic, over, tokens, dtype, pair
):
    """The token has the ratio 0 and x = -inf in weights and criteria of sequences.

    A rollout log-prob of +inf, which is none, has the same x. The second sequence leaves out a NaN.
    """
    logprobs, rollout_logprobs = (t.to(dtype) for t in sampled((3, tokens)))
    logprobs[1, tokens // 2], rollout_logprobs[1, tokens // 2] = pair
    if tokens > 1:
        rollout_logprobs[1:, -1] = math.nan
    mask = torch.rand(3, tokens, dtype=dtype) + 0.1
    bound = {"ratio": {"low": 1e-9}, "k1": {"low": -1e6}}.get(statistic, {"high": 1e6})
    rules = (Rejection(statistic, over, **bound),)
    for weight, options in itertools.product(
        ("sequence", "geometric", None), ({}, {"floor": 0.5}, {"floor": 0.5, "outside": "mask"})
    ):
        if weight is None and "floor" in options:
            continue
        args = {"weight": weight, "reject": rules, **options}
        got = klfast.rollout_correction(logprobs, rollout_logprobs, mask, backend=backend, **args)
        truth = oracle_rollout.rollout_correction(logprobs, rollout_logprobs, mask, **args)
        assert torch.equal(got.mask != 0, truth.mask)
        if weight is not None:
            error = (got.weights.double() - truth.weights).abs()
            assert (error <= truth.weights_tolerance).all()
        for name in ("tokens", "nonfinite", "rejected", "below", "outside", "kept"):
            torch.testing.assert_close(getattr(got.stats, name).double(), truth.stats[name])
        for name in ("weight", "weight_squares", "weight_deviation", "min_weight", "k1", "k3"):
            expected, allowed = truth.stats[name], truth.tolerance[name]
            assert ((getattr(got.stats, name).double() - expected).abs() <= allowed).all(), name
        (seen,) = got.stats.rules
        for name, of_sequence in truth.rules[0].items():
            torch.testing.assert_close(
                getattr(seen, name).double(), of_sequence, rtol=1e-4, atol=1e-5, msg=name
            )
        assert got.mask[0].all()
        assert got.mask[2, : max(tokens - 1, 1)].all()
        if over in ("seq-sum", "seq-mean") and not statistic.startswith(("binary", "diff")):
            assert not got.mask[1].any()


@every_weight
def test_what_is_outside_of_the_bounds_is_counted_by_finite_tokens(backend, weight):
    """One token of the first sequence is above the cap. The second has no finite token."""
    logprobs = torch.tensor([[-1.0, math.nan], [math.nan, math.nan]])
    stats = klfast.rollout_correction(
        logprobs, torch.full((2, 2), -4.0), weight=weight, cap=2.0, reject=RULES, backend=backend
    ).stats
    expected = [0, 0] if weight is None else [1, 0]
    assert stats.above.tolist() == stats.outside.tolist() == expected
    assert stats.min_log_ratio.tolist() == stats.max_log_ratio.tolist() == [3, 0]
    assert all(leaf.isfinite().all() for leaf in tensors_of(stats))


@pytest.mark.parametrize("weight", WEIGHTS[1:])
@pytest.mark.parametrize("difference", [15.0, 25.0, 100.0, 1e4, 3e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_difference_overflows_nothing_but_its_own_square(backend, sign, difference, weight):
    logprobs = torch.tensor([[-1.0, -1 - sign * difference], [-1.0, -2.0]])
    rollout_logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -2.0]])
    if sign < 0:
        logprobs, rollout_logprobs = torch.full((2, 2), -1.0), logprobs.clone()
        rollout_logprobs[:, 1] = torch.tensor([-1 + sign * difference, -1.0])
    weights, mask, stats = klfast.rollout_correction(
        logprobs, rollout_logprobs, weight=weight, cap=None, reject=RULES, backend=backend
    )
    assert weights.isfinite().all()
    assert (weights <= math.exp(20) * 1.0001).all()
    assert (weights >= math.exp(-20) * 0.9999).all()
    assert not mask[0, 1]
    assert mask[1].all()
    quadratic = {"k2"}
    fields = {name: t for name, t in stats._asdict().items() if name not in {"rules", *quadratic}}
    assert all(t.isfinite().all() for t in fields.values())
    assert not any(leaf.isnan().any() for leaf in tree_leaves(stats))


def test_nothing_is_kept_where_all_is_rejected_under_any_mask(backend):
    """Sums of ones and of fractions may be added in another order. Their difference stays 0."""
    mask = torch.cat([torch.ones(64), torch.rand(128)]).view(1, -1)
    logprobs = torch.full_like(mask, 0.5)
    rule = klfast.Rejection("k1", high=0.1)
    stats = klfast.rollout_correction(
        logprobs, torch.zeros_like(mask), mask, reject=rule, backend=backend
    ).stats
    assert stats.kept.tolist() == [0]


def test_a_floor_beyond_the_greatest_exponential(backend):
    stats = klfast.rollout_correction(
        torch.full((1, 3), 25.0), torch.zeros(1, 3), floor=1e10, cap=None, backend=backend
    ).stats
    torch.testing.assert_close(stats.weight_deviation, torch.tensor([3e20]), rtol=1e-6, atol=0)


@every_weight
def test_more_tokens_than_a_16_bit_index_counts(backend, weight):
    """Only the last of 65,537 tokens is kept, so it alone is every number."""
    logprobs, mask = last_alone(-1.5)
    weights, kept, stats = klfast.rollout_correction(
        logprobs, torch.full_like(logprobs, -1.0), mask, weight=weight, backend=backend
    )
    assert torch.equal(kept, mask)
    assert stats.k1.tolist() == [0, -0.5]
    if weights is not None:
        torch.testing.assert_close(weights, mask * math.exp(-0.5), rtol=1e-6, atol=0)
