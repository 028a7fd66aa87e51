"""klfast.compat.trl against TRL 0.11.4, the last with the old PPOTrainer."""

import types

import pytest
import torch
from comparison import assert_same_controllers, inputs, same_numbers
from trl.trainer import utils
from trl.trainer.ppo_trainer import PPOTrainer

import klfast
from klfast.compat import presets, trl

KL_PENALTY = PPOTrainer._kl_penalty


def trainer(mode, **others):
    """The attributes that a method of PPOTrainer reads."""
    return types.SimpleNamespace(config=types.SimpleNamespace(kl_penalty=mode), **others)


def penalty(logprobs, ref_logprobs, kl_penalty):
    return KL_PENALTY(trainer(kl_penalty), logprobs, ref_logprobs)


test_penalties = same_numbers(
    trl, {"kl_penalty": penalty}, *(f"trl ppo {mode}" for mode in presets.TRL_PPO)
)


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
    assert_same_controllers(*(of.AdaptiveKLController(0.2, 6.0, 10000) for of in (utils, trl)))


@pytest.mark.parametrize("shape", [(2, 5, 33), (7, 33)])
def test_full(shape):
    logprobs, ref_logprobs = (torch.randn(shape, dtype=torch.float64).log_softmax(-1) for _ in "ab")
    ours, other = (f(logprobs, ref_logprobs, "full") for f in (trl.kl_penalty, penalty))
    torch.testing.assert_close(ours, other, rtol=1e-13, atol=1e-15)
