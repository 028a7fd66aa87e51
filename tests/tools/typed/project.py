"""A user's file for type checkers: every public function with the type of its result.

``test_types.py`` checks it against installations of klfast. It runs, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import assert_type

import klfast
from klfast import (
    BackendName,
    DirectionName,
    Estimator,
    EstimatorName,
    GradientName,
    KLDivergence,
    KLStats,
    ReductionName,
    Rejection,
    RolloutCorrection,
    RolloutStats,
    TokenLogprobs,
)


def penalties(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    flag: bool,
    estimator: EstimatorName = "k3+",
    reduction: ReductionName = "token-mean",
    backend: BackendName = "auto",
) -> Tensor:
    """``kl_penalty`` and ``kl_rewards`` with and without statistics."""
    loss = klfast.kl_penalty(
        logprobs, ref_logprobs, mask, estimator=estimator, reduction=reduction, backend=backend
    )
    assert_type(loss, Tensor)
    loss, stats = klfast.kl_penalty(logprobs, ref_logprobs, coef=0.1, return_stats=True)
    assert_type(loss, Tensor)
    assert_type(stats, KLStats)
    assert_type(
        klfast.kl_penalty(logprobs, ref_logprobs, return_stats=flag),
        Tensor | tuple[Tensor, KLStats],
    )
    assert_type(klfast.reduce(loss, mask, reduction=reduction, coef=0.1), Tensor)
    scores = torch.zeros(logprobs.shape[0])
    rewards = klfast.kl_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.1)
    assert_type(rewards, Tensor)
    assert_type(
        klfast.kl_rewards(scores, logprobs, ref_logprobs, kl_coef=0.1, return_stats=True),
        tuple[Tensor, KLStats],
    )
    assert_type(stats.token_mean(), Tensor)
    assert_type(stats.sequence_mean(), Tensor)
    assert_type(stats.as_dict(), dict[str, Tensor])
    assert_type(stats.kl, Tensor)
    assert_type(KLStats.cat([stats, stats]), KLStats)
    assert_type(stats + stats, KLStats)
    assert_type(stats.to_floats(), dict[str, float])
    return loss


def one_object(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> None:
    """``KLPenalty``, and the normalizer of data parallelism."""
    controller = klfast.NuPIKLController(0.05, target=6.0)
    penalty = klfast.KLPenalty("k3+", "token-mean", controller=controller)
    normalizer = klfast.data_parallel_normalizer(mask, "token-mean")
    assert_type(normalizer, Tensor)
    assert_type(penalty(logprobs, ref_logprobs, mask, normalizer=normalizer), Tensor)
    assert_type(penalty.step(), dict[str, float])
    klfast.kl_rewards(torch.zeros(2), logprobs, ref_logprobs, kl_coef=controller)


def estimators(gradient: GradientName = "k2") -> Estimator:
    """Names of estimators and of their gradients."""
    chosen = Estimator("k3", gradient=gradient, log_ratio_clip=(-1, 2), kl_clip=10)
    assert_type(chosen, Estimator)
    assert_type(chosen.kl_clip, float | None)
    return Estimator("k1+")


def of_logits(
    logits: Tensor,
    ref_logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    flag: bool,
    direction: DirectionName = "reverse",
) -> None:
    """``token_logprobs`` and ``kl_divergence``."""
    assert_type(klfast.token_logprobs(logits, token_ids, mask), Tensor)
    taken = klfast.token_logprobs(logits, token_ids, return_entropy=True)
    assert_type(taken, TokenLogprobs)
    assert_type(taken.entropy, Tensor)
    assert_type(
        klfast.token_logprobs(logits, token_ids, return_entropy=flag), Tensor | TokenLogprobs
    )
    assert_type(klfast.kl_divergence(logits, ref_logits, mask, direction=direction), Tensor)
    found = klfast.kl_divergence(logits, ref_logits, return_stats=True)
    assert_type(found, KLDivergence)
    assert_type(found.kl, Tensor)
    assert_type(found.logprobs, Tensor | None)
    assert_type(found.stats, KLStats | None)
    assert_type(klfast.kl_divergence(logits, ref_logits, return_entropy=True), KLDivergence)
    assert_type(klfast.kl_divergence(logits, ref_logits, token_ids=token_ids), KLDivergence)
    assert_type(
        klfast.kl_divergence(
            logits, ref_logits, token_ids=token_ids, return_entropy=flag, return_stats=flag
        ),
        KLDivergence,
    )
    assert_type(
        klfast.kl_divergence(logits, ref_logits, return_entropy=flag, return_stats=flag),
        Tensor | KLDivergence,
    )


def between_sampler_and_trainer(logprobs: Tensor, rollout_logprobs: Tensor) -> None:
    """``rollout_correction``."""
    veto = Rejection("ratio", "seq-min", low=1e-4)
    corrected = klfast.rollout_correction(logprobs, rollout_logprobs, cap=2.0, reject=veto)
    assert_type(corrected, RolloutCorrection)
    weights, mask, stats = corrected
    assert_type(weights, Tensor | None)
    assert_type(mask, Tensor)
    assert_type(stats, RolloutStats)
    assert_type(stats.as_dict(), dict[str, Tensor])


def controllers(logprobs: Tensor, ref_logprobs: Tensor, stats: KLStats) -> None:
    """Controllers, monitors, triggers and logs."""
    named = klfast.get_kl_controller(0.1, target=6.0)
    assert_type(named, klfast.FixedKLController | klfast.AdaptiveKLController)
    for controller in (
        klfast.FixedKLController(0.1),
        klfast.AdaptiveKLController(0.1, 6.0),
        klfast.ExponentialKLController(),
        klfast.NuPIKLController(0.1, 6.0),
        klfast.PIDLagrangianKLController(0.1, 6.0),
        klfast.DualKLController(0.1, 6.0),
        klfast.DoublingKLController(0.1, 6.0),
        klfast.ControlVAEKLController(0.1, 6.0),
        klfast.ScheduledKLController(0.1, 6.0),
    ):
        controller.update(stats)
        controller.load_state_dict(controller.state_dict())
        klfast.kl_penalty(logprobs, ref_logprobs, coef=controller)
    grouped = klfast.GroupedKLController(klfast.NuPIKLController, 0.1, {"chat": 6.0})
    grouped.update({"chat": stats})
    monitor, alarm = klfast.KLMonitor(0.1), klfast.KLDriftAlarm(20.0)
    if monitor.update(stats) == "high" or alarm.update(stats) == "drifting":
        print("far off")
    assert_type(klfast.KLEarlyStop(0.1).update(stats), bool)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    klfast.KLAdaptiveLR(optimizer, 0.1).step(stats)
    klfast.ReferenceReset(interval=10).update(stats)
    profile = klfast.log_ratio_profile(logprobs, ref_logprobs)
    assert_type(profile, klfast.LogRatioProfile)

    class Scalars:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            print(name, value, step)

    log = klfast.KLLog(Scalars(), names="trl")
    assert_type(log(0, stats, controller=named, profile=profile), dict[str, float])


def others() -> None:
    """Facts of the installation, and a framework's function."""
    assert_type(klfast.__version__, str)
    print(sorted(klfast.info()))
    in_place: Callable[..., Tensor] = klfast.compat.verl.kl_penalty
    print(in_place.__name__, klfast.names.BackendName)


if __name__ == "__main__":
    logprobs, ref_logprobs = -torch.rand(2, 5), -torch.rand(2, 5)
    logits, ref_logits = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    penalties(logprobs, ref_logprobs, None, True)
    one_object(logprobs, ref_logprobs, torch.ones(2, 5))
    estimators()
    of_logits(logits, ref_logits, torch.zeros(2, 5, dtype=torch.long), None, True)
    between_sampler_and_trainer(logprobs, ref_logprobs)
    controllers(
        logprobs, ref_logprobs, klfast.kl_penalty(logprobs, ref_logprobs, return_stats=True)[1]
    )
    others()
