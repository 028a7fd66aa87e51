"""klfast.compat.verl against verl itself: values, gradients, averages, rewards, controllers."""

import pickle
import types

import pytest
import torch
from comparison import assert_agrees, assert_same_arguments, every_dtype, every_spread, inputs
from verl import DataProto
from verl.trainer.config import KLControlConfig
from verl.trainer.distillation.fsdp import losses as fsdp_losses
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import torch_functional

import klfast
from klfast.compat import presets, verl

MODES = [*presets.VERL]
LOSS_MODES = [*verl.REDUCTIONS]


def test_arguments_have_verl_s_names_order_and_defaults():
    controllers = ("get_kl_controller", "AdaptiveKLController", "FixedKLController")
    assert_same_arguments(core_algos, verl, "kl_penalty", "agg_loss", *controllers)
    assert_same_arguments(ray_trainer, verl, "apply_kl_penalty")
    functions = "logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking"
    assert_same_arguments(torch_functional, verl, *functions)
    assert_same_arguments(fsdp_losses, verl, "compute_forward_kl_topk")


@every_dtype
@every_spread
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode, spread, dtype):
    logprobs, ref_logprobs, *_ = inputs(spread, dtype)
    assert_agrees(verl.kl_penalty, core_algos.kl_penalty, logprobs, ref_logprobs, mode)


@pytest.mark.parametrize("mode", MODES)
def test_exact_keeps_verl_s_dtype(mode):
    logprobs, ref_logprobs, *_ = inputs(0.3, torch.bfloat16)
    ours = verl.kl_penalty(logprobs, ref_logprobs, mode, exact=True)
    theirs = core_algos.kl_penalty(logprobs, ref_logprobs, mode)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    exact = core_algos.kl_penalty(logprobs.double(), ref_logprobs.double(), mode)
    assert ((ours - exact).abs() <= (theirs - exact).abs() + 2**-8 * exact.abs()).all()


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"dp_size": 4, "batch_num_tokens": 321, "global_batch_size": 17},
        {"batch_num_tokens": torch.tensor(97), "global_batch_size": torch.tensor(5)},
        {"loss_scale_factor": 1000},
    ],
    ids=["local", "global", "tensors", "scale"],
)
@every_dtype
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_every_average(mode, counts, dtype):
    logprobs, ref_logprobs, _, mask = inputs(1.0, dtype)

    def ours(logprobs, ref_logprobs):
        return verl.agg_loss(verl.kl_penalty(logprobs, ref_logprobs, "k3"), mask, mode, **counts)

    def fused(logprobs, ref_logprobs):
        return verl.kl_loss(logprobs, ref_logprobs, "k3", mask, mode, **counts)

    def theirs(logprobs, ref_logprobs):
        loss = core_algos.kl_penalty(logprobs, ref_logprobs, "k3")
        return core_algos.agg_loss(loss, mask, mode, **counts)

    assert_agrees(ours, theirs, logprobs, ref_logprobs)
    assert_agrees(fused, theirs, logprobs, ref_logprobs)


def batch(dtype=torch.float32, mask_dtype=torch.int64):
    logprobs, ref_logprobs, _, mask = inputs(0.3, dtype)
    return DataProto.from_dict(
        {
            "old_log_probs": logprobs,
            "ref_log_prob": ref_logprobs,
            "response_mask": mask.to(mask_dtype),
            "token_level_scores": torch.randn(logprobs.shape),
        }
    )


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.float32])
@every_dtype
@pytest.mark.parametrize("mode", ["kl", "abs", "mse", "low_var_kl"])
def test_rewards_on_a_real_dataproto(mode, dtype, mask_dtype):
    """B is 6, and one sequence has no token: it counts in verl's mean, as 0."""
    torch.manual_seed(1)
    mine = batch(dtype, mask_dtype)
    torch.manual_seed(1)
    other = batch(torch.float64, mask_dtype)
    for name in ("old_log_probs", "ref_log_prob"):
        other.batch[name] = mine.batch[name].double()
    controllers = [c(0.25, 0.1, 100) for c in (verl.AdaptiveKLController, ADAPTIVE)]
    data, metrics = verl.apply_kl_penalty(mine, controllers[0], mode)
    assert data is mine
    data, true_metrics = ray_trainer.apply_kl_penalty(other, controllers[1], mode)
    torch.testing.assert_close(
        mine.batch["token_level_rewards"].double(),
        data.batch["token_level_rewards"].double(),
        rtol=1e-6,
        atol=1e-6,
    )
    assert metrics.keys() == true_metrics.keys()
    for name, value in true_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    assert controllers[0].value == pytest.approx(float(controllers[1].value), rel=1e-7)
    assert controllers[0].value != 0.25


ADAPTIVE = core_algos.AdaptiveKLController
KLS = [0.02, 0.3, 0.11, 0.09, 5.0, -0.1, 0.1]


def test_the_controllers_agree_bit_for_bit():
    kinds = (ADAPTIVE, verl.AdaptiveKLController)
    theirs, ours = (kind(0.001, target_kl=0.1, horizon=10000) for kind in kinds)
    for kl in KLS * 10:
        theirs.update(current_kl=kl, n_steps=256)
        ours.update(current_kl=kl, n_steps=256)
        assert ours.value == theirs.value
    fixed = verl.FixedKLController(kl_coef=0.5)
    fixed.update(current_kl=3.0, n_steps=1)
    assert fixed.value == core_algos.FixedKLController(kl_coef=0.5).value


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_the_factory_reads_verl_s_own_config(kind):
    config = KLControlConfig(type=kind, kl_coef=0.002, horizon=500, target_kl=0.2)
    theirs, ours = core_algos.get_kl_controller(config), verl.get_kl_controller(config)
    assert ours.value == theirs.value == 0.002
    if kind == "adaptive":
        assert (ours.target, ours.horizon) == (theirs.target, theirs.horizon)
    with pytest.raises(ValueError, match=r"unknown kl_ctrl\.type 'other'; expected one of 'fixed'"):
        verl.get_kl_controller(types.SimpleNamespace(type="other"))


def test_patch_reaches_every_module_that_imported_by_name():
    from verl.trainer.distillation import losses as distillation
    from verl.workers.utils import losses

    holders = [
        (core_algos, "kl_penalty"),
        (losses, "kl_penalty"),
        (distillation, "kl_penalty"),
        (core_algos, "agg_loss"),
        (losses, "agg_loss"),
        (ray_trainer, "agg_loss"),
        (ray_trainer, "apply_kl_penalty"),
        (core_algos, "AdaptiveKLController"),
    ]
    before = [getattr(module, name) for module, name in holders]
    assert all(f.__module__.startswith("verl.") for f in before)
    with klfast.compat.patch("verl"):
        for (module, name), old in zip(holders, before, strict=True):
            assert getattr(module, name) is not old, (module, name)
        logprobs, ref_logprobs, *_ = inputs(1.0, torch.float32)
        kl = losses.kl_penalty(logprob=logprobs, ref_logprob=ref_logprobs, kl_penalty="k3")
        assert torch.equal(kl, verl.kl_penalty(logprobs, ref_logprobs, "k3"))
        controller = core_algos.get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.1))
        assert isinstance(controller, verl.AdaptiveKLController)
        assert pickle.loads(pickle.dumps(controller)).value == 0.1
        ray_trainer.apply_kl_penalty(batch(), controller)
        assert controller.value != 0.1
    assert [getattr(module, name) for module, name in holders] == before


def test_verl_s_own_loss_function_trains_the_same_under_the_patch():
    """workers.utils.losses.ppo_loss as verl's actor calls it, with use_kl_loss."""
    from tensordict import TensorDict
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils import losses

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

    def run(monkeypatch):
        monkeypatch.setattr(losses, "no_padding_2_padding", lambda tensor, data: tensor)
        leaf = logprobs.clone().requires_grad_()
        loss, metrics = losses.ppo_loss(config, {"log_probs": leaf}, data)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics["kl_loss"].values

    with pytest.MonkeyPatch.context() as monkeypatch:
        theirs = run(monkeypatch)
        with klfast.compat.patch("verl"):
            ours = run(monkeypatch)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
    assert not torch.equal(ours[1], torch.zeros_like(ours[1]))
