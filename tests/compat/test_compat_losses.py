"""klfast.compat's losses and rewards of SkyRL and ms-swift.

Each loss is the framework's per-token KL under the framework's mean: ``frameworks``, in float64.
"""

import math
from types import SimpleNamespace

import frameworks
import pytest
import torch
from agreement import random_inputs

from klfast.compat import ms_swift, presets, skyrl

NAN, INF = math.nan, math.inf
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
    ]
)


def skyrls(mode):
    def theirs(logprobs, ref_logprobs, old):
        kl = frameworks.skyrl(logprobs, ref_logprobs, MASK, mode)
        return frameworks.masked_mean(kl, MASK).mean()

    def ours(logprobs, ref_logprobs, old):
        return skyrl.kl_loss(logprobs, ref_logprobs, MASK, mode)

    return ours, theirs


LOSSES = {f"skyrl-{mode}": skyrls(mode) for mode in presets.SKYRL}
every_loss = pytest.mark.parametrize(("ours", "theirs"), LOSSES.values(), ids=LOSSES)


def inputs(dtype=torch.float64):
    """Log-ratios on both sides of the limits: spread 4."""
    return random_inputs(tuple(MASK.shape), dtype, spread=4.0)


def differentiated(function, logprobs, ref_logprobs, old):
    """(value, gradients to logprobs and ref_logprobs)."""
    leaves = [t.detach().requires_grad_() for t in (logprobs, ref_logprobs)]
    value = function(*leaves, old)
    return value.detach(), *torch.autograd.grad(value, leaves)


@every_loss
def test_loss_and_gradients(ours, theirs):
    given = inputs()
    for result, truth in zip(
        differentiated(ours, *given), differentiated(theirs, *given), strict=True
    ):
        assert result.shape == truth.shape
        torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_loss
def test_lower_dtypes_give_fp32_and_gradients_of_their_own(ours, theirs, dtype):
    given = inputs(dtype)
    results = differentiated(ours, *given)
    truths = differentiated(theirs, *(t.double() for t in given))
    assert [t.dtype for t in results] == [torch.float32, dtype, dtype]
    for result, truth in zip(results, truths, strict=True):
        rounding = torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.double(), truth, rtol=2 * rounding + 1e-5, atol=1e-6)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF], ids=str)
@every_loss
def test_what_is_masked_is_not_read(ours, theirs, garbage):
    clean = inputs()
    dirty = [torch.where(MASK == 0, garbage, t) for t in clean]
    for result, expected in zip(
        differentiated(ours, *dirty), differentiated(ours, *clean), strict=True
    ):
        assert torch.equal(result, expected)


def test_losses_of_nothing_are_0():
    nothing, masks = torch.zeros(2, 3), torch.zeros(2, 3)
    assert skyrl.kl_loss(nothing, nothing, masks) == 0
    assert skyrl.kl_loss(torch.zeros(0, 3), torch.zeros(0, 3)) == 0


def test_an_unknown_word_names_the_argument_and_the_choices():
    expected = r"unknown kl_estimator_type 'k4'; expected one of .*abs"
    with pytest.raises(ValueError, match=expected):
        skyrl.kl_loss(torch.zeros(2), torch.zeros(2), kl_estimator_type="k4")


# Rewards


class SkyRLTrainer:
    """What SkyRL's method needs of its trainer."""

    def __init__(self, mode, controller=None):
        algorithm = SimpleNamespace(kl_estimator_type=mode, kl_loss_coef=0.3)
        self.cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm))
        self.reward_kl_controller = controller
        self.all_metrics = {"other": 1}


class SkyRLBatch(dict):
    """SkyRL's TrainingInputBatch."""

    def __init__(self, logprobs, ref_logprobs, rewards, mask=MASK):
        super().__init__(
            action_log_probs=logprobs,
            base_action_log_probs=ref_logprobs,
            rewards=rewards,
            loss_mask=mask,
        )
        self.metadata = {}


@pytest.mark.parametrize("controlled", [False, True], ids=["fixed", "controlled"])
@pytest.mark.parametrize("mode", presets.SKYRL)
def test_skyrls_reward(mode, controlled):
    logprobs, ref_logprobs, rewards = inputs()
    controller = skyrl.AdaptiveKLController(0.2, 0.1, 100) if controlled else None
    coefficient = 0.2 if controlled else 0.3
    trainer, data = SkyRLTrainer(mode, controller), SkyRLBatch(logprobs, ref_logprobs, rewards)
    assert skyrl.apply_reward_kl_penalty(trainer, data) is data

    kl = frameworks.skyrl(logprobs, ref_logprobs, MASK, mode)
    torch.testing.assert_close(data["rewards"], rewards - coefficient * kl, rtol=1e-12, atol=1e-14)
    metrics = data.metadata["metrics"]
    average = frameworks.masked_mean(kl, MASK).mean().item()
    assert metrics == pytest.approx(
        {
            "avg_kl": average,
            "avg_kl_max": kl.abs().max(-1)[0].mean().item(),
            "kl_loss_coef": coefficient,
        }
    )
    logged = {f"loss/{name}": value for name, value in metrics.items()}
    assert trainer.all_metrics == {"other": 1, **logged}
    if controlled:
        step = frameworks.controller_step(0.2, metrics["avg_kl"], 0.1, len(MASK), 100)
        assert controller.value == step


def test_skyrls_reward_reads_nothing_masked_and_keeps_other_metrics():
    clean = inputs()
    dirty = [torch.where(MASK == 0, NAN, t) for t in clean[:2]]
    batches = [SkyRLBatch(*given, clean[2]) for given in (clean[:2], dirty)]
    for data in batches:
        data.metadata["metrics"] = {"other": 2}
        skyrl.apply_reward_kl_penalty(SkyRLTrainer("k3"), data)
    assert torch.equal(batches[0]["rewards"], batches[1]["rewards"])
    assert batches[0].metadata == batches[1].metadata
    assert batches[0].metadata["metrics"]["other"] == 2


def test_ms_swifts_reward():
    logprobs, ref_logprobs, _ = inputs()
    expected = frameworks.trl_rloo(logprobs, ref_logprobs, MASK)
    torch.testing.assert_close(ms_swift.sequence_kl(logprobs, ref_logprobs, MASK), expected)
    dirty = torch.where(MASK == 0, NAN, ref_logprobs)
    torch.testing.assert_close(ms_swift.sequence_kl(logprobs, dirty, MASK), expected)
