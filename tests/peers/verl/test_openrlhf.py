"""klfast.compat.openrlhf against OpenRLHF itself."""

import sys

import pytest
import torch
from comparison import (
    assert_no_farther,
    assert_same_arguments,
    assert_same_controllers,
    inputs,
    logits_and_index,
    reaching,
    same_numbers,
)
from openrlhf.models import actor, utils
from openrlhf.trainer import ppo_trainer, ppo_utils
from openrlhf.trainer.ppo_utils import experience_maker, kl_controller
from openrlhf.trainer.ray import ppo_actor
from transformers import LlamaConfig, LlamaForCausalLM

import klfast
from klfast.compat import openrlhf, presets


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    """Run without flash-attn, whose stand-in has no cross entropy, and without torch.compile."""
    monkeypatch.setitem(sys.modules, "flash_attn.ops.triton.cross_entropy", None)
    with torch.compiler.set_stance("force_eager"):
        yield


def test_arguments_have_openrlhf_s_names_order_and_defaults():
    functions = "compute_reward", "log_probs_from_logits", "compute_entropy"
    assert_same_arguments(utils, openrlhf, "compute_approx_kl", *functions)


test_penalties = same_numbers(
    openrlhf,
    {"compute_approx_kl": utils.compute_approx_kl},
    *(f"openrlhf {mode}" for mode in presets.OPENRLHF),
    "openrlhf unbiased",
)


def reward(r, kl_coef, kl, mask, clip):
    """OpenRLHF's reward, which is not 0 at masked tokens by itself."""
    return utils.compute_reward(torch.as_tensor(r).expand(len(kl)), kl_coef, kl, mask, clip) * mask


test_rewards = same_numbers(openrlhf, {"compute_reward": reward}, "openrlhf reward")
test_over_logits = same_numbers(
    openrlhf,
    {
        # OpenRLHF divides by the temperature in place.
        "log_probs_from_logits": lambda x, *more, **options: utils.log_probs_from_logits(
            x * 1.0, *more, **options
        ),
        "compute_entropy": utils.compute_entropy,
    },
    *("openrlhf logprobs", "openrlhf entropy"),
)


def test_exact_keeps_the_dtype_and_divides_in_place():
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


def test_the_actor_s_forward_is_the_same_under_the_patch():
    """A real model's logits are scaled. The loss has its log-probs and entropy."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes)
    policy = actor.Actor(LlamaForCausalLM(config), temperature=0.7)
    policy.packing_samples = False  # it sets this only if it loads the model
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
    assert_same_controllers(
        *(
            of.AdaptiveKLController(init_kl_coef=0.2, target=6.0, horizon=10000)
            for of in (kl_controller, openrlhf)
        )
    )
    assert openrlhf.FixedKLController(kl_coef=0.1).value == 0.1


def test_patch_reaches_the_actor_and_the_experience_maker():
    holders = [(of, "compute_approx_kl") for of in (utils, ppo_actor, experience_maker)]
    holders += [(experience_maker, "compute_reward"), (actor, "log_probs_from_logits")]
    holders += [(actor, "compute_entropy"), (ppo_utils, "AdaptiveKLController")]
    holders += [(ppo_trainer, "FixedKLController")]
    logprobs, ref_logprobs, *_ = inputs(1.0, torch.float32)
    with reaching("openrlhf", *holders):
        kl = ppo_actor.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
        expected = openrlhf.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
        assert torch.equal(kl, expected)
        assert issubclass(ppo_utils.AdaptiveKLController, klfast.AdaptiveKLController)
