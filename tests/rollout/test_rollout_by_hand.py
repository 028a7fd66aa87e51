"""The documentation's statements, in numbers small enough to check by hand."""

import math

import pytest
import torch

import klfast
from klfast import Rejection

LOG2, LOG3 = math.log(2), math.log(3)


def of_ratios(*rows, **options):
    """The correction for tokens with these ratios p / q and a rollout log-prob of -2."""
    x = torch.tensor(rows, dtype=torch.float64).log()
    return klfast.rollout_correction(x - 2, torch.full_like(x, -2), **options)


@pytest.mark.parametrize("x", [0.1, -0.3, 0.7, 2.3])
@pytest.mark.parametrize("statistic", ["ratio", "k1"])
def test_a_token_at_its_bound_passes(backend, statistic, x):
    """A token's bound is rounded to fp32, as its x was. A sequence's bound is not."""
    bound = math.exp(x) if statistic == "ratio" else x
    for over, passes in (("token", True), ("seq-max", False)):
        rule = Rejection(statistic, over, low=bound, high=bound)
        pair = torch.tensor([[x]]), torch.zeros(1, 1)
        assert klfast.rollout_correction(*pair, reject=rule, backend=backend).mask.item() == passes


def test_a_weight_at_its_cap_is_not_counted_above(backend):
    x = torch.tensor([[0.1]])
    found = klfast.rollout_correction(x, torch.zeros(1, 1), cap=math.exp(0.1), backend=backend)
    assert found.stats.above.item() == 0


def test_a_bound_that_is_reached_keeps(backend):
    x = torch.tensor([0.5, -0.5, 0.75])
    for rule, expected in [
        (Rejection("k1", high=0.5), [True, True, False]),
        (Rejection("abs", high=0.5), [True, True, False]),
        (Rejection("k2", high=0.125), [True, True, False]),
        (Rejection("k1", low=-0.5), [True, True, True]),
        (Rejection("k1", "seq-sum", high=0.75), [True, True, True]),
        (Rejection("k1", "seq-mean", low=0.25, high=0.25), [True, True, True]),
        (Rejection("k1", "seq-max", high=0.5), [False, False, False]),
    ]:
        kept = klfast.rollout_correction(
            x - 1, torch.full((3,), -1.0), reject=rule, backend=backend
        )
        assert kept.mask.tolist() == expected, rule
        if all(expected):
            (seen,) = kept.stats.rules
            assert (seen.below.item(), seen.above.item()) == (0, 0), rule


def test_on_policy_is_within_any_bounds_around_1(backend):
    same = torch.full((2, 3), -1.25)
    weights, mask, stats = klfast.rollout_correction(
        same,
        same,
        floor=1.0,
        cap=1.0,
        outside="mask",
        reject=[Rejection("ratio", low=1.0, high=1.0), Rejection("k3", "seq-sum", high=1e-30)],
        backend=backend,
    )
    assert torch.equal(weights, torch.ones(2, 3))
    assert mask.all()
    logged = stats.as_dict("")
    assert all(logged[name] == 0 for name in ("kl", "k2", "k3", "chi2_token", "chi2_sequence"))
    assert all(logged[name] == 1 for name in ("ess", "weight_mean", "weight_min", "weight_max"))


def test_all_rules_must_hold_each_by_itself():
    rules = [Rejection("ratio", high=5), Rejection("ratio", "seq-min", low=0.6)]
    corrected = of_ratios([8, 1, 1], [1, 0.5, 1], reject=rules)
    assert corrected.mask.tolist() == [[False, True, True], [False] * 3]
    assert corrected.stats.kept.tolist() == [2, 0]
    assert corrected.stats.rejected.tolist() == [1, 3]
    assert [seen.above.tolist() for seen in corrected.stats.rules] == [[1, 0], [0, 0]]
    assert [seen.below.tolist() for seen in corrected.stats.rules] == [[0, 0], [0, 1]]


def test_a_rejected_token_keeps_its_weight():
    corrected = of_ratios([8, 1], reject=Rejection("ratio", high=5))
    assert corrected.weights.tolist() == [[2, 1]]
    assert corrected.mask.tolist() == [[False, True]]
    assert corrected.token_weights.tolist() == [[0, 1]]
    without = of_ratios([8, 1], reject=Rejection("ratio", high=5), weight=None).token_weights
    assert without.tolist() == [[0, 1]]
    assert without.dtype == corrected.weights.dtype


def test_the_mask_keeps_its_dtype_and_its_weights():
    given = torch.tensor([[0.5, 2.0, 0.0]], dtype=torch.bfloat16)
    kept = of_ratios([8, 1, 1], mask=given, reject=Rejection("ratio", high=5)).mask
    assert kept.dtype == torch.bfloat16
    assert kept.tolist() == [[0, 2, 0]]
    assert given.tolist() == [[0.5, 2, 0]]


def test_every_number_of_as_dict():
    """Two sequences have the ratios 8 and 1/4, and 0.8. A third keeps nothing."""
    corrected = of_ratios(
        [8, 0.25],
        [0.8, 7],
        [9, 9],
        mask=torch.tensor([[1, 1], [1, 0], [0, 0]]),
        reject=Rejection("ratio", high=5),
    )
    x = [3 * LOG2, -2 * LOG2, math.log(0.8)]
    mean = [0.5 * LOG2, math.log(0.8)]
    k3 = [8 - 1 - x[0], 0.25 - 1 - x[1], 0.8 - 1 - x[2]]
    expected = {
        "kl": -sum(x) / 3,
        "k2": sum(each**2 for each in x) / 6,
        "k3": sum(k3) / 3,
        "abs_log_ratio": (5 * LOG2 - math.log(0.8)) / 3,
        "min_log_ratio": -2 * LOG2,
        "max_log_ratio": 3 * LOG2,
        "error": (7 + 3 + 0.25) / 3,
        "policy_ppl": (math.exp(2 - mean[0]) + math.exp(2 - mean[1])) / 2,
        "rollout_ppl": math.exp(2),
        "log_ppl_diff": -(mean[0] + mean[1]) / 2,
        "chi2_token": (63 + 1 / 16 - 1 + 0.64 - 1) / 3,
        "chi2_sequence": (2**2 - 1 + 0.64 - 1) / 2,
        "ess": 3.05**2 / (3 * (4 + 1 / 16 + 0.64)),
        "weight_mean": 3.05 / 3,
        "weight_min": 0.25,
        "weight_max": 2,
        "outside": 1 / 3,
        "above": 1 / 3,
        "below": 1 / 3,
        "rejected_tokens": 1 / 3,
        "rejected_sequences": 0,
        "touched_sequences": 1 / 2,
        "tokens": 3,
        "kept_tokens": 2,
        "nonfinite": 0,
    }
    logged = corrected.stats.as_dict()
    assert {name: value.item() for name, value in logged.items()} == {
        f"rollout/{name}": pytest.approx(value, abs=1e-12) for name, value in expected.items()
    }
    assert all(value.dim() == 0 for value in logged.values())
    assert set(corrected.stats.as_dict("a/")) == {f"a/{name}" for name in expected}


def test_as_dict_of_no_sequences():
    corrected = klfast.rollout_correction(
        torch.zeros(0, 3), torch.zeros(0, 3), normalize="token", reject=Rejection("k3", high=1)
    )
    assert corrected.weights.shape == corrected.mask.shape == (0, 3)
    assert all(value == 0 for value in corrected.stats.as_dict().values())


@pytest.mark.parametrize("over", ["seq-sum", "seq-mean", "seq-max", "seq-min"])
def test_a_sequence_without_tokens_fails_no_lower_bound(backend, over):
    """Its sum would be 0, which is below the bound."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -3.0]])
    seen = klfast.rollout_correction(
        logprobs,
        torch.full((2, 2), -1.5),
        torch.tensor([[1, 1], [0, 0]]),
        reject=Rejection("abs", over, low=5.0),
        backend=backend,
    ).stats.rules[0]
    assert seen.below.tolist() == [1, 0]
    assert seen.bounded.tolist() == [5, 0]
