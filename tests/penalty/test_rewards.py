"""kl_rewards: -kl_coef * kl at every kept token, and the score at the last one."""

import math

import pytest
import torch

import klfast


def rewards_of(backend, scores, mask, logprobs=None, kl_coef=0.5):
    mask = torch.tensor(mask)
    logprobs = torch.ones(mask.shape) if logprobs is None else logprobs
    return klfast.kl_rewards(
        torch.tensor(scores), logprobs, torch.zeros(mask.shape), mask, kl_coef=kl_coef,
        backend=backend,
    )  # fmt: skip


def test_rewards_by_hand(backend):
    """All log-ratios are 1. Sequences have gaps, one kept token, none, and all."""
    mask = [[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    rewards = rewards_of(backend, [10.0, 20.0, 30.0, 40.0], mask)
    assert rewards.tolist() == [
        [-0.5, 0, 9.5, 0],
        [19.5, 0, 0, 0],
        [0, 0, 0, 0],
        [-0.5, -0.5, -0.5, 39.5],
    ]


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
def test_scores_are_passed_on_as_they_are(backend, score):
    rewards = rewards_of(backend, [score, 1.0], [[1, 1], [1, 1]])
    assert rewards[0, 0] == -0.5
    assert rewards[1].tolist() == [-0.5, 0.5]
    assert rewards[0, 1].isnan() if math.isnan(score) else rewards[0, 1] == score


@pytest.mark.parametrize("score", [math.inf, math.nan])
def test_the_score_of_a_sequence_without_tokens_goes_nowhere(backend, score):
    assert rewards_of(backend, [score, 1.0], [[0, 0], [0, 1]]).tolist() == [[0, 0], [0, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool], ids=str)
def test_scores_of_any_dtype(backend, dtype):
    scores = torch.tensor([1, 0], dtype=dtype)
    rewards = klfast.kl_rewards(
        scores, torch.zeros(2, 2), torch.zeros(2, 2), kl_coef=0.1, backend=backend
    )
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("last", [0, 16_383, 16_384, 40_000, 69_999])
def test_the_last_kept_token_of_a_long_sequence(backend, last):
    mask = torch.zeros(2, 70_000, dtype=torch.bool)
    mask[:, 0] = True
    mask[1, last] = True
    rewards = klfast.kl_rewards(
        torch.tensor([5.0, 7.0]), torch.ones(2, 70_000), torch.ones(2, 70_000), mask, kl_coef=0.1,
        backend=backend,
    )  # fmt: skip
    assert rewards.count_nonzero() == 2
    assert rewards[0, 0] == 5
    assert rewards[1, last] == 7


def test_rewards_carry_no_gradient(backend):
    scores, logprobs, ref_logprobs = (torch.zeros(3, requires_grad=True) for _ in range(3))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            rewards, stats = klfast.kl_rewards(
                scores, logprobs[:, None], ref_logprobs[:, None], kl_coef=0.1, return_stats=True,
                backend=backend,
            )  # fmt: skip
        assert not rewards.requires_grad
        assert not any(field.requires_grad for field in stats)
        assert rewards.is_leaf


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16], ids=str)
def test_a_coefficient_in_any_dtype_is_taken_off(backend, dtype):
    rewards = klfast.kl_rewards(
        torch.zeros(1),
        torch.tensor([[1.0]]),
        torch.tensor([[0.0]]),
        kl_coef=torch.tensor(1, dtype=dtype),
        backend=backend,
    )
    assert rewards.tolist() == [[-1.0]]
