"""klfast.compat.trl against TRL 0.11.4, the last with the old PPOTrainer."""

import types

import pytest
import torch
from comparison import assert_agrees, every_dtype, every_spread, inputs
from trl.trainer import utils
from trl.trainer.ppo_trainer import PPOTrainer

import klfast
from klfast.compat import trl

KL_PENALTY = PPOTrainer._kl_penalty


def trainer(mode, **others):
    """What a method of PPOTrainer needs of its trainer."""
    return types.SimpleNamespace(config=types.SimpleNamespace(kl_penalty=mode), **others)


def theirs(logprobs, ref_logprobs, mode):
    return KL_PENALTY(trainer(mode), logprobs, ref_logprobs)


@every_dtype
@every_spread
@pytest.mark.parametrize("mode", ["kl", "abs", "mse"])
def test_every_mode(mode, spread, dtype):
    logprobs, ref_logprobs, *_ = inputs(spread, dtype)
    assert_agrees(trl.kl_penalty, theirs, logprobs, ref_logprobs, mode)
    assert_agrees(trl.kl_penalty, theirs, logprobs[1], ref_logprobs[1], mode)


@pytest.mark.parametrize("shape", [(2, 5, 33), (7, 33)])
def test_full(shape):
    logprobs, ref_logprobs = (torch.randn(shape, dtype=torch.float64).log_softmax(-1) for _ in "ab")
    ours, other = (f(logprobs, ref_logprobs, "full") for f in (trl.kl_penalty, theirs))
    torch.testing.assert_close(ours, other, rtol=1e-13, atol=1e-15)
    assert ours.shape == shape[:-1]


def test_patch_serves_compute_rewards():
    logprobs, ref_logprobs, _, mask = inputs(0.3, torch.float32)
    mask[0, :2] = True
    scores = torch.randn(6)

    def rewards(mode):
        held = trainer(mode, kl_ctl=types.SimpleNamespace(value=0.2))
        held._kl_penalty = types.MethodType(PPOTrainer._kl_penalty, held)
        return PPOTrainer.compute_rewards(held, scores, logprobs, ref_logprobs, mask)

    for mode in ("kl", "abs", "mse"):
        before = rewards(mode)
        with klfast.compat.patch("trl"):
            assert PPOTrainer._kl_penalty is not KL_PENALTY
            after = rewards(mode)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
    assert PPOTrainer._kl_penalty is KL_PENALTY


def test_the_controllers_agree_bit_for_bit():
    theirs, ours = (
        c(0.2, 6.0, 10000) for c in (utils.AdaptiveKLController, trl.AdaptiveKLController)
    )
    for kl in [1.0, 6.5, 20.0, 5.9, -1.0] * 20:
        theirs.update(kl, 256)
        ours.update(kl, 256)
        assert ours.value == theirs.value
