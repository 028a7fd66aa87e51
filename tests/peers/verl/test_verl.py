"""klfast.compat.verl against verl itself: values, gradients, averages, rewards, controllers."""

import pickle
import types

import pytest
import torch
from comparison import (
    assert_close,
    assert_no_farther,
    assert_same_arguments,
    assert_same_controllers,
    inputs,
    logits_and_index,
    reaching,
    same_numbers,
)
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config import KLControlConfig
from verl.trainer.distillation import losses as distillation
from verl.trainer.distillation.fsdp import losses as fsdp_losses
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import torch_functional
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout.naive import naive_rollout
from verl.workers.utils import losses

import klfast
from klfast.compat import presets, verl

OVER_LOGITS = ("logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking")


@pytest.fixture(autouse=True)
def _without_flash_attn(monkeypatch):
    """The stand-in of flash-attn has no cross entropy."""
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", "1")


def test_arguments_have_verl_s_names_order_and_defaults():
    controllers = ("get_kl_controller", "AdaptiveKLController", "FixedKLController")
    assert_same_arguments(core_algos, verl, "kl_penalty", "agg_loss", *controllers)
    assert_same_arguments(ray_trainer, verl, "apply_kl_penalty")
    assert_same_arguments(torch_functional, verl, *OVER_LOGITS)
    assert_same_arguments(fsdp_losses, verl, "compute_forward_kl_topk")


def kl_loss(logprobs, ref_logprobs, name, mask, *, loss_agg_mode, **counts):
    """The KL loss as verl computes it."""
    kl = core_algos.kl_penalty(logprobs, ref_logprobs, name)
    return core_algos.agg_loss(kl, mask, loss_agg_mode, **counts)


def chunked(x, chunk_size=2048):
    """The entropies in float64. verl itself writes them into an fp32 tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", lambda n, device: torch.empty(n, dtype=torch.float64))
        found = torch_functional.entropy_from_logits_with_chunking(x.flatten(0, -2), chunk_size)
        return found.view(x.shape[:-1])


test_penalties = same_numbers(
    verl, {"kl_penalty": core_algos.kl_penalty}, *(f"verl {mode}" for mode in presets.VERL)
)
test_averages = same_numbers(
    verl, {"agg_loss": core_algos.agg_loss, "kl_loss": kl_loss}, "verl agg_loss", "verl kl_loss"
)
test_over_logits = same_numbers(
    verl,
    {
        "logprobs_from_logits": torch_functional.logprobs_from_logits,
        "entropy_from_logits": torch_functional.entropy_from_logits,
        "entropy_from_logits_with_chunking": chunked,
    },
    *("verl logprobs", "verl entropy", "verl chunked"),
)


def test_exact_keeps_verl_s_dtype():
    logprobs, ref_logprobs, *_ = inputs(0.3, torch.bfloat16)
    for mode in presets.VERL:
        assert_no_farther(
            lambda x, y, mode=mode: verl.kl_penalty(x, y, mode, exact=True),
            lambda x, y, mode=mode: core_algos.kl_penalty(x, y, mode),
            logprobs,
            ref_logprobs,
        )
    logits, labels = logits_and_index(torch.bfloat16)
    assert_no_farther(
        lambda x, index: verl.logprobs_from_logits(x, index, exact=True),
        torch_functional.logprobs_from_logits,
        logits,
        labels,
    )
    assert_no_farther(
        lambda x: verl.entropy_from_logits(x, exact=True),
        torch_functional.entropy_from_logits,
        logits,
    )


def batch(dtype=torch.float32, mask_dtype=torch.int64):
    logprobs, ref_logprobs, _, mask = inputs(0.3, dtype)
    return DataProto.from_dict(
        {
            "old_log_probs": logprobs,
            "ref_log_prob": ref_logprobs,
            "response_mask": mask.to(mask_dtype),
            "token_level_scores": torch.randn(logprobs.shape, dtype=dtype),
        }
    )


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("mode", ["kl", "abs", "mse", "low_var_kl"])
def test_rewards_on_a_real_dataproto(mode, mask_dtype):
    """B is 6. One sequence has no token, and counts as 0 in verl's mean."""
    found = []
    for of, kind in ((verl, verl), (ray_trainer, core_algos)):
        torch.manual_seed(1)
        given = batch(torch.float64, mask_dtype)
        controller = kind.AdaptiveKLController(0.25, 0.1, 100)
        data, metrics = of.apply_kl_penalty(given, controller, mode)
        assert data is given
        found.append((data.batch["token_level_rewards"], metrics, float(controller.value)))
    (rewards, metrics, value), (true_rewards, true_metrics, true_value) = found
    torch.testing.assert_close(rewards, true_rewards, rtol=1e-12, atol=1e-12)
    assert metrics == pytest.approx(true_metrics, rel=1e-6)
    assert value == pytest.approx(true_value, rel=1e-7)
    assert value != 0.25


def test_the_controllers_agree_bit_for_bit():
    for kind, *given in ("AdaptiveKLController", 0.001, 0.1, 10000), ("FixedKLController", 0.5):
        assert_same_controllers(*(getattr(of, kind)(*given) for of in (core_algos, verl)))


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_the_factory_reads_verl_s_own_config(kind):
    config = KLControlConfig(type=kind, kl_coef=0.002, horizon=500, target_kl=0.2)
    theirs, ours = core_algos.get_kl_controller(config), verl.get_kl_controller(config)
    assert ours.value == theirs.value == 0.002
    if kind == "adaptive":
        assert (ours.target, ours.horizon) == (theirs.target, theirs.horizon)
    with pytest.raises(ValueError, match=r"unknown kl_ctrl\.type 'other'; expected one of 'fixed'"):
        verl.get_kl_controller(types.SimpleNamespace(type="other"))


def test_patch_reaches_every_module_that_imported_by_name(monkeypatch):
    holders = [(of, "kl_penalty") for of in (core_algos, losses, distillation)]
    holders += [(of, "agg_loss") for of in (core_algos, losses, ray_trainer)]
    holders += [(ray_trainer, "apply_kl_penalty"), (core_algos, "AdaptiveKLController")]
    holders += [(torch_functional, name) for name in OVER_LOGITS]
    holders += [(of, OVER_LOGITS[0]) for of in (transformer_impl, naive_rollout)]
    logits, labels = logits_and_index(torch.float32)
    with reaching("verl", *holders):
        logprobs, ref_logprobs, *_ = inputs(1.0, torch.float32)
        kl = losses.kl_penalty(logprob=logprobs, ref_logprob=ref_logprobs, kl_penalty="k3")
        assert torch.equal(kl, verl.kl_penalty(logprobs, ref_logprobs, "k3"))
        controller = core_algos.get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.1))
        assert isinstance(controller, verl.AdaptiveKLController)
        assert pickle.loads(pickle.dumps(controller)).value == 0.1
        ray_trainer.apply_kl_penalty(batch(), controller)
        assert controller.value != 0.1
        found = transformer_impl.logprobs_from_logits(logits=logits, labels=labels)
        assert torch.equal(found, verl.logprobs_from_logits(logits, labels))
        # verl's own functions that call it.
        response = torch_functional.log_probs_from_logits_response(labels, logits, 4)
        assert torch.equal(response, verl.logprobs_from_logits(logits[:, :-1], labels[:, 1:]))
        calls = []
        monkeypatch.setattr(klfast.compat.common, "entropy", lambda x, **_: calls.append(x) or x)
        transformer_impl.verl_F.entropy_from_logits(logits)
        assert len(calls) == 1


def test_verl_s_own_loss_function_trains_the_same_under_the_patch(monkeypatch):
    """The loss is workers.utils.losses.ppo_loss, called like in verl's actor with use_kl_loss."""
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_kl_loss=True,
        kl_loss_coef=0.5,
        kl_loss_type="low_var_kl",
        loss_agg_mode="token-mean",
    )
    logprobs, ref_logprobs, old_logprobs, mask = inputs(0.3, torch.float32)
    data = TensorDict(
        {
            "response_mask": mask.long(),
            "old_log_probs": old_logprobs,
            "ref_log_prob": ref_logprobs,
            "advantages": torch.randn(mask.shape),
        },
        batch_size=mask.shape[0],
    )
    for name, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}.items():
        data.set_non_tensor(name, value)
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda tensor, data: tensor)

    def run():
        leaf = logprobs.clone().requires_grad_()
        loss, metrics = losses.ppo_loss(config, {"log_probs": leaf}, data)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics["kl_loss"].values

    theirs = run()
    with klfast.compat.patch("verl"):
        ours = run()
    assert_close(ours, theirs)
    assert ours[1].any()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_an_engine_s_step_is_the_same_under_the_patch(checkpointed):
    """Like verl's engines, the step scales logits in place and computes entropy and log-probs."""
    values, labels = logits_and_index(torch.float32, (40,))
    weight = torch.randn(40)

    def step():
        leaf = values.clone().requires_grad_()
        logits = transformer_impl._scale_logits_by_temperature(
            leaf * 1.0, torch.full((40, 1), 0.7), is_unit_temperature=False
        )
        entropy_of = torch_functional.entropy_from_logits
        if checkpointed:
            entropy = torch.utils.checkpoint.checkpoint(entropy_of, logits, use_reentrant=False)
        else:
            entropy = entropy_of(logits)
        logprobs = transformer_impl.logprobs_from_logits(
            logits=logits, labels=labels, inplace_backward=False
        )
        loss = (logprobs * weight).mean() - 0.1 * entropy.mean()
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    theirs = step()
    with klfast.compat.patch("verl"):
        ours = step()
    assert_close(ours, theirs)
    assert ours[1].abs().amax() > 1e-3
