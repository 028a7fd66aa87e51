"""klfast.compat.skyrl against SkyRL itself."""

from types import SimpleNamespace

import pytest
import torch
from comparison import (
    assert_agrees,
    assert_entropies_agree,
    assert_logprobs_agree,
    assert_same_arguments,
    every_dtype,
    every_spread,
    inputs,
    logits_and_index,
)
from skyrl.backends.skyrl_train.mtp import soft_ce
from skyrl.backends.skyrl_train.utils import ppo_utils, torch_utils
from skyrl.backends.skyrl_train.workers import worker
from skyrl.train import trainer

import klfast
from klfast.compat import presets, skyrl

REPLACED = {
    ppo_utils: (
        "compute_approx_kl",
        "AdaptiveKLController",
        "FixedKLController",
        "get_kl_controller",
    ),
    torch_utils: ("logprobs_from_logits", "chunked_entropy_from_logits"),
}


def test_arguments_have_skyrl_s_names_order_and_defaults():
    assert_same_arguments(ppo_utils, skyrl, "compute_approx_kl", "get_kl_controller")
    assert_same_arguments(torch_utils, skyrl, *REPLACED[torch_utils])
    assert_same_arguments(trainer.RayPPOTrainer, skyrl, "apply_reward_kl_penalty")
    assert_same_arguments(soft_ce, skyrl, "draft_soft_ce", "draft_soft_ce_topk")


@every_dtype
@every_spread
@pytest.mark.parametrize("mode", presets.SKYRL)
def test_every_estimator(mode, spread, dtype):
    logprobs, ref_logprobs, _, mask = inputs(spread, dtype)
    for of_tokens in (None, mask):
        options = (of_tokens, mode)
        assert_agrees(
            skyrl.compute_approx_kl, ppo_utils.compute_approx_kl, logprobs, ref_logprobs, *options
        )


@every_dtype
@pytest.mark.parametrize("mode", presets.SKYRL)
def test_the_term_of_the_loss(mode, dtype):
    logprobs, ref_logprobs, _, mask = inputs(0.3, dtype)

    def theirs(logprobs, ref_logprobs):
        kl = ppo_utils.compute_approx_kl(logprobs, ref_logprobs, mask, mode)
        return torch_utils.masked_mean(kl, mask, dim=-1).mean()

    def ours(logprobs, ref_logprobs):
        return skyrl.kl_loss(logprobs, ref_logprobs, mask, mode)

    assert_agrees(ours, theirs, logprobs, ref_logprobs)


@every_dtype
def test_log_probs_and_entropies(dtype):
    logits, labels = logits_and_index(dtype)
    assert_logprobs_agree(
        skyrl.logprobs_from_logits, torch_utils.logprobs_from_logits, logits, labels
    )
    ours, theirs = (
        lambda logits, f=module.chunked_entropy_from_logits: f(logits, requires_grad=True)
        for module in (skyrl, torch_utils)
    )
    assert_entropies_agree(ours, theirs, logits)


def test_the_draft_head_s_loss():
    teacher, student = torch.randn(2, 2, 5, 37, dtype=torch.float64)
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [0, 0, 0, 1, 1]])
    for options in ({}, {"global_normalization_factor": torch.tensor(9.0)}):
        for name, more in (("draft_soft_ce", {}), ("draft_soft_ce_topk", {"k": 4})):
            ours, theirs = (
                _value_and_gradient(getattr(module, name), student, teacher, mask, more | options)
                for module in (skyrl, soft_ce)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # theirs is in fp32


def _value_and_gradient(loss, student, teacher, mask, options):
    leaf = student.clone().requires_grad_()
    value = loss(leaf, teacher, mask, **options)
    return value.detach().double(), torch.autograd.grad(value, leaf)[0]


def settings(**of_algorithm):
    """A trainer's ``cfg.trainer.algorithm``."""
    kl_ctrl = SimpleNamespace(type="adaptive", kl_target=0.1, horizon=1_000)
    return SimpleNamespace(
        kl_estimator_type="k3", kl_loss_coef=0.2, kl_ctrl=kl_ctrl, **of_algorithm
    )


def test_the_controllers_agree_bit_for_bit():
    theirs, ours = (module.get_kl_controller(settings()) for module in (ppo_utils, skyrl))
    for kl in [0.1, 0.3, 20.0, 0.05, -1.0] * 20:
        theirs.update(kl, 128)
        ours.update(kl, 128)
        assert ours.value == theirs.value


def rewards(controller):
    """The rewards and metrics of the trainer's method, whoever's it is."""
    logprobs, ref_logprobs, _, mask = inputs(0.3, torch.float64)
    batch = {
        "action_log_probs": logprobs,
        "base_action_log_probs": ref_logprobs,
        "loss_mask": mask.double(),
        "rewards": torch.linspace(-1, 1, mask.numel(), dtype=torch.float64).view(mask.shape),
    }
    data = type("Batch", (dict,), {})(batch)
    data.metadata = {}
    of_trainer = SimpleNamespace(
        cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=settings())),
        reward_kl_controller=controller,
        all_metrics={},
    )
    trainer.RayPPOTrainer.apply_reward_kl_penalty(of_trainer, data)
    return data["rewards"], {**data.metadata["metrics"], **of_trainer.all_metrics}


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_patch_replaces_all_of_it_and_rewards_are_the_same(adaptive):
    before = {(m, name): getattr(m, name) for m, names in REPLACED.items() for name in names}
    controllers = [ppo_utils.get_kl_controller(settings()) if adaptive else None for _ in range(2)]
    torch.manual_seed(1)
    theirs, their_metrics = rewards(controllers[0])
    with klfast.compat.patch("skyrl", strict=True) as made:
        assert str(made).startswith("klfast in skyrl 0.3.0\n")
        assert len(made.replaced) == 7
        assert made.left == ()
        assert not any(getattr(m, name) is old for (m, name), old in before.items())
        assert trainer.compute_approx_kl is worker.compute_approx_kl is ppo_utils.compute_approx_kl
        torch.manual_seed(1)
        ours, our_metrics = rewards(controllers[1])
        made_there = ppo_utils.get_kl_controller(settings())
        assert isinstance(made_there, klfast.AdaptiveKLController)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert our_metrics == pytest.approx(their_metrics, rel=1e-12)
    if adaptive:
        assert controllers[1].value == pytest.approx(controllers[0].value, rel=1e-12)
    assert all(getattr(m, name) is old for (m, name), old in before.items())
