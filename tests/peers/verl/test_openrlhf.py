"""klfast.compat.openrlhf against OpenRLHF itself."""

import sys

import pytest
import torch
from comparison import (
    assert_agrees,
    assert_entropies_agree,
    assert_logprobs_agree,
    assert_no_farther,
    assert_same_arguments,
    every_dtype,
    every_spread,
    inputs,
    logits_and_index,
)
from openrlhf.models import actor, utils
from openrlhf.trainer.ppo_utils import kl_controller

import klfast
from klfast.compat import openrlhf


@pytest.fixture
def theirs(monkeypatch):
    """Their function with its upcast to fp32 made one to float64: the truth, by their own code."""

    def in_float64(*args, **options):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "float", torch.Tensor.double)
            return utils.compute_approx_kl(*args, **options)

    return in_float64


def test_arguments_have_openrlhf_s_names_order_and_defaults():
    functions = "compute_reward", "log_probs_from_logits", "compute_entropy"
    assert_same_arguments(utils, openrlhf, "compute_approx_kl", *functions)


@every_dtype
@every_spread
@pytest.mark.parametrize("unbiased", [False, True], ids=["", "unbiased"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_estimator(theirs, estimator, unbiased, spread, dtype):
    logprobs, ref_logprobs, old_logprobs, _ = inputs(spread, dtype)
    for old in (None, old_logprobs):
        options = (old, estimator, unbiased)
        assert_agrees(openrlhf.compute_approx_kl, theirs, logprobs, ref_logprobs, *options)


@pytest.mark.parametrize("clip", [None, (-0.5, 0.5)])
@pytest.mark.parametrize("kl_coef", [0.1, 0.0, -1.0])
@every_dtype
def test_rewards(dtype, kl_coef, clip):
    kl, _, _, mask = inputs(1.0, dtype)
    mask[0, :3] = True  # theirs gives a score to an empty sequence's last slot
    mask[5, 7] = False
    r = torch.linspace(-1, 1, 6)
    ours = openrlhf.compute_reward(r, kl_coef, kl, mask, clip)
    theirs = utils.compute_reward(r, kl_coef, kl.double(), mask, clip)
    torch.testing.assert_close(ours.double(), theirs * mask, rtol=1e-6, atol=1e-6)
    exact = openrlhf.compute_reward(r, kl_coef, kl, mask, clip, exact=True)
    same_dtype = utils.compute_reward(r, kl_coef, kl, mask, clip)
    assert exact.dtype == same_dtype.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(exact.double(), theirs, rtol=2 * eps, atol=2 * eps)


@pytest.fixture
def cpu(monkeypatch):
    """No flash-attn, whose stand-in is no cross entropy, and ``compute_entropy`` uncompiled."""
    monkeypatch.setitem(sys.modules, "flash_attn.ops.triton.cross_entropy", None)
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(3, 5), (7,)], ids=str)
@every_dtype
def test_log_probs_from_logits(cpu, dtype, shape, temperature):
    logits, labels = logits_and_index(dtype, shape)
    assert_logprobs_agree(
        lambda x, index: openrlhf.log_probs_from_logits(x, index, temperature),
        lambda x, index: utils.log_probs_from_logits(x * 1.0, index, temperature),  # in place
        logits,
        labels,
        temperature,
    )


@pytest.mark.parametrize("shape", [(3, 5), (7,)], ids=str)
@every_dtype
def test_entropy(cpu, dtype, shape):
    logits, _ = logits_and_index(dtype, shape)
    assert_entropies_agree(openrlhf.compute_entropy, utils.compute_entropy, logits)


def test_exact_keeps_the_dtype_and_divides_in_place(cpu):
    logits, labels = logits_and_index(torch.bfloat16)
    assert_no_farther(
        lambda x, index: openrlhf.log_probs_from_logits(x, index, exact=True),
        utils.log_probs_from_logits,
        logits,
        labels,
    )
    assert_no_farther(
        lambda x: openrlhf.compute_entropy(x, exact=True), utils.compute_entropy, logits
    )
    mine, other = logits.clone(), logits.clone()
    openrlhf.log_probs_from_logits(mine, labels, 0.7, exact=True)
    utils.log_probs_from_logits(other, labels, 0.7)
    assert torch.equal(mine, other)
    assert not torch.equal(mine, logits)


def test_the_actor_s_forward_is_the_same_under_the_patch(cpu):
    """A real model's logits, scaled; the loss has the log-probs and the entropy in it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes)
    policy = actor.Actor(LlamaForCausalLM(config), temperature=0.7)
    policy.packing_samples = False  # which it sets where it loads the model itself
    tokens = torch.randint(50, (3, 9))
    kept = torch.ones(3, 9)
    kept[1, 7:] = 0

    def step():
        logprobs, output = policy(
            tokens, kept[:, 4:], kept, return_output=True, return_entropy=True
        )
        loss = logprobs.mean() - 0.1 * output.entropy.mean()
        return loss.detach(), *torch.autograd.grad(loss, [*policy.parameters()])

    theirs = step()
    with klfast.compat.patch("openrlhf"):
        ours = step()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


def test_the_controllers_agree_bit_for_bit():
    theirs, ours = (
        c(init_kl_coef=0.2, target=6.0, horizon=10000)
        for c in (kl_controller.AdaptiveKLController, openrlhf.AdaptiveKLController)
    )
    for kl in [1.0, 6.5, 20.0, 5.9, -1.0] * 20:
        theirs.update(kl, 128)
        ours.update(kl, 128)
        assert ours.value == theirs.value
    assert openrlhf.FixedKLController(kl_coef=0.1).value == 0.1


def test_patch_reaches_the_actor_and_the_experience_maker():
    from openrlhf.trainer import ppo_trainer, ppo_utils
    from openrlhf.trainer.ppo_utils import experience_maker
    from openrlhf.trainer.ray import ppo_actor

    holders = [
        (utils, "compute_approx_kl"),
        (ppo_actor, "compute_approx_kl"),
        (experience_maker, "compute_approx_kl"),
        (experience_maker, "compute_reward"),
        (actor, "log_probs_from_logits"),
        (actor, "compute_entropy"),
        (ppo_utils, "AdaptiveKLController"),
        (ppo_trainer, "FixedKLController"),
    ]
    before = [getattr(module, name) for module, name in holders]
    logprobs, ref_logprobs, *_ = inputs(1.0, torch.float32)
    with klfast.compat.patch("openrlhf"):
        assert not any(getattr(m, n) is old for (m, n), old in zip(holders, before, strict=True))
        kl = ppo_actor.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
        assert torch.equal(
            kl, openrlhf.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
        )
        assert issubclass(ppo_utils.AdaptiveKLController, klfast.AdaptiveKLController)
    assert [getattr(module, name) for module, name in holders] == before
