"""klfast.compat.trl against TRL 0.11.4, the last with the old PPOTrainer."""

import types

import pytest
import torch
from agreement_logits import random_logits
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_full_of_a_model_s_logits(dtype):
    """Value and gradients no farther from the truth than twice TRL's own, and a rounding."""
    logits, ref_logits = random_logits(6, 40, 50, dtype=dtype)

    def full(function, *both):
        """(per-token KL, its gradients at the logits)."""
        both = [t.detach().requires_grad_() for t in both]
        value = function(*(t.log_softmax(-1) for t in both), "full")
        upstream = torch.linspace(0.5, 1.75, value.numel(), dtype=value.dtype).view(value.shape)
        return value.detach(), *torch.autograd.grad(value, both, upstream)

    truth = full(theirs, logits.double(), ref_logits.double())
    for exact, mine, other in zip(
        truth,
        full(trl.kl_penalty, logits, ref_logits),
        full(theirs, logits, ref_logits),
        strict=True,
    ):
        rounding = torch.finfo(dtype).eps / 2 * exact.norm()
        assert (mine - exact).norm() <= 2 * (other - exact).norm() + rounding


def test_full_differs_by_what_bf16_log_probs_do_not_sum_to_one():
    """As ``divergences.full_kl`` says of theirs: exp(a) * (KL + a - b)."""
    logits, ref_logits = random_logits(6, 40, 50, apart=0.01)
    logprobs, ref_logprobs = (t.log_softmax(-1).bfloat16() for t in (logits, ref_logits))
    kl = trl.kl_penalty(logprobs, ref_logprobs, "full").double()
    sums = theirs(logprobs.double(), ref_logprobs.double(), "full")
    a, b = (t.double().logsumexp(-1) for t in (logprobs, ref_logprobs))
    torch.testing.assert_close(sums, a.exp() * (kl + a - b), rtol=4e-6, atol=1e-12)
    assert (kl >= 0).all()
    assert (sums < 0).any()


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
