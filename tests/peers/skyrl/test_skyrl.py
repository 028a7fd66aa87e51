"""klfast.compat.skyrl against SkyRL itself."""

import shlex
from types import SimpleNamespace

import pytest
import readme
import torch
from comparison import (
    assert_same_arguments,
    assert_same_controllers,
    inputs,
    reaching,
    same_numbers,
)
from skyrl.backends.skyrl_train.mtp import soft_ce
from skyrl.backends.skyrl_train.utils import ppo_utils, torch_utils
from skyrl.backends.skyrl_train.workers import worker
from skyrl.train import trainer
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils.utils import validate_cfg

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


def kl_loss(logprobs, ref_logprobs, mask, **options):
    """The KL loss as SkyRL computes it."""
    kl = ppo_utils.compute_approx_kl(logprobs, ref_logprobs, mask, **options)
    return torch_utils.masked_mean(kl, mask, dim=-1).mean()


test_penalties = same_numbers(
    skyrl,
    {"compute_approx_kl": ppo_utils.compute_approx_kl},
    *(f"skyrl {mode}" for mode in presets.SKYRL),
)
test_losses = same_numbers(skyrl, {"kl_loss": kl_loss}, "skyrl kl_loss")
test_over_logits = same_numbers(
    skyrl,
    {
        "logprobs_from_logits": torch_utils.logprobs_from_logits,
        "chunked_entropy_from_logits": torch_utils.chunked_entropy_from_logits,
    },
    *("skyrl logprobs", "skyrl entropy"),
)
test_the_draft_head_s_loss = same_numbers(
    skyrl,
    {name: getattr(soft_ce, name) for name in ("draft_soft_ce", "draft_soft_ce_topk")},
    # SkyRL's factor must be a tensor.
    *("skyrl draft None", "skyrl draft tensor(9.)", "skyrl draft tensor(0.5000)"),
    "skyrl draft of",
    rtol=1e-6,  # SkyRL computes in fp32
    atol=1e-7,
)


def settings(**of_algorithm):
    """A trainer's ``cfg.trainer.algorithm``."""
    kl_ctrl = SimpleNamespace(type="adaptive", kl_target=0.1, horizon=1_000)
    return SimpleNamespace(
        kl_estimator_type="k3", kl_loss_coef=0.2, kl_ctrl=kl_ctrl, **of_algorithm
    )


def test_the_controllers_agree_bit_for_bit():
    assert_same_controllers(*(of.get_kl_controller(settings()) for of in (ppo_utils, skyrl)))


def rewards(controller):
    """The rewards and metrics of the trainer's method, patched or not."""
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
    holders = [(module, name) for module, names in REPLACED.items() for name in names]
    controllers = [ppo_utils.get_kl_controller(settings()) if adaptive else None for _ in range(2)]
    torch.manual_seed(1)
    theirs, their_metrics = rewards(controllers[0])
    with reaching("skyrl", *holders, strict=True) as made:
        assert str(made).startswith("klfast in skyrl 0.3.0\n")
        assert len(made.replaced) == 7
        assert made.left == ()
        assert trainer.compute_approx_kl is worker.compute_approx_kl is ppo_utils.compute_approx_kl
        torch.manual_seed(1)
        ours, our_metrics = rewards(controllers[1])
        made_there = ppo_utils.get_kl_controller(settings())
        assert isinstance(made_there, klfast.AdaptiveKLController)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert our_metrics == pytest.approx(their_metrics, rel=1e-12)
    if adaptive:
        assert controllers[1].value == pytest.approx(controllers[0].value, rel=1e-12)


def test_the_page_s_command_has_skyrl_s_options():
    words = shlex.split(readme.code("skyrl-command").replace("\\\n", ""))
    given = words[words.index("skyrl.train.entrypoints.main_base") + 1 :]
    config = SkyRLTrainConfig.from_cli_overrides(given)
    validate_cfg(config)
    algorithm = config.trainer.algorithm
    assert (algorithm.use_kl_loss, algorithm.kl_estimator_type) == (True, "k3")
