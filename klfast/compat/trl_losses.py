"""TRL's KL over log-probs: of GRPO's and RLOO's losses, and of the older PPO."""

from __future__ import annotations

from torch import Tensor

from klfast.api import kl_penalty as fused_kl_penalty
from klfast.checks.arguments import check_choice
from klfast.compat.common import per_token, per_token_or_full
from klfast.compat.presets import TRL_GRPO, TRL_PPO, TRL_RLOO
from klfast.names import ReductionName
from klfast.stats import KLStats

REDUCTIONS: dict[str, ReductionName] = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "bnpo": "token-mean",
    "dr_grpo": "token-mean",
    "cispo": "token-mean",
    "dapo": "token-mean",
    "vespo": "token-mean",
}
"""``loss_type`` -> klfast's reduction."""

GLOBAL_COUNT = ("cispo", "dapo", "vespo")
"""Divided by the token count per rank of the whole batch, gradient accumulation included."""

NEED_NORMALIZER = ("dr_grpo", *GLOBAL_COUNT)
LEVELS = ("token", "sequence")


def per_token_kl(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    old_per_token_logps: Tensor | None = None,
    *,
    use_bias_correction_kl: bool = True,
    exact: bool = False,
) -> Tensor:
    """GRPO's per-token KL [B, T], in nats: ``w * (expm1(-x) + x)``, x = policy - reference.

    With ``use_bias_correction_kl`` (TRL's default since 1.16) w is the ratio
    ``exp(per_token_logps - old_per_token_logps)``, differentiable, with the policy itself for the
    old one if it is None: a weight of 1 that turns k3's gradient into the reverse KL's. Without it
    w is 1. ``importance_sampling_level="sequence"`` is :func:`kl_loss`'s.

    Differs from TRL: digits near 0; fp32 for lower dtypes unless ``exact=True``.
    """
    old = _old(per_token_logps, old_per_token_logps) if use_bias_correction_kl else None
    return per_token(per_token_logps, ref_per_token_logps, TRL_GRPO, old_logprobs=old, exact=exact)


def kl_loss(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    mask: Tensor,
    *,
    beta: float,
    loss_type: str = "dapo",
    normalizer: float | Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    use_bias_correction_kl: bool = True,
    importance_sampling_level: str = "token",
) -> tuple[Tensor, KLStats]:
    """The KL term of GRPO's loss: per-token KL, mask, mean and ``beta`` in one read.

    Args:
        per_token_logps: [B, T], of the policy.
        ref_per_token_logps: [B, T], of the reference.
        mask: [B, T]; what a masked token holds, NaN too, has no effect.
        beta: the coefficient.
        loss_type: how tokens are averaged. ``grpo``, ``sapo``: mean over all B sequences of their
            means, ``luspo``: of their sums. ``bnpo``: mean over tokens. ``dr_grpo``, ``cispo``,
            ``dapo``, ``vespo``: sum over tokens / ``normalizer``.
        normalizer: of the last four. For ``dr_grpo`` B * max_completion_length; for the others the
            token count of all ranks, gradient accumulation included, divided by the number of
            ranks, because their gradients are averaged.
        old_per_token_logps: see :func:`per_token_kl`, like the next.
        use_bias_correction_kl: see there.
        importance_sampling_level: ``"token"``: a weight per token; ``"sequence"``: one per
            sequence, the exp of the mean of its log-ratios (GSPO).

    Returns:
        The loss (0-dim, nats * beta), before TRL's division by the gradient accumulation steps, and
        the ``klfast.KLStats`` of the same read, whose ``kl`` carries the weights: TRL's metric
        ``kl`` is ``stats.kl.sum() / stats.length.sum()``.

    Differs from TRL: NaN and inf under the mask have no effect (TRL multiplies by the mask).
    """
    check_choice("loss_type", loss_type, tuple(REDUCTIONS))
    check_choice("importance_sampling_level", importance_sampling_level, LEVELS)
    if (normalizer is None) == (loss_type in NEED_NORMALIZER):
        needs = "be given" if normalizer is None else "be None"
        raise ValueError(f"normalizer must {needs} for loss_type {loss_type!r}, got {normalizer!r}")
    reduction = REDUCTIONS[loss_type]
    if reduction != "token-mean":
        normalizer = max(1, per_token_logps.shape[0])  # empty sequences count, as in TRL
    old = _old(per_token_logps, old_per_token_logps) if use_bias_correction_kl else None
    if old is None or importance_sampling_level == "token":
        return fused_kl_penalty(
            per_token_logps,
            ref_per_token_logps,
            mask,
            estimator=TRL_GRPO,
            reduction=reduction,
            old_logprobs=old,
            normalizer=normalizer,
            coef=beta,
            return_stats=True,
        )
    log_weight = fused_kl_penalty(
        per_token_logps, old.detach(), mask, estimator="k1", reduction="seq-mean"
    )
    kl, stats = fused_kl_penalty(
        per_token_logps,
        ref_per_token_logps,
        mask,
        estimator=TRL_GRPO,
        reduction="seq-mean" if reduction == "seq-mean-token-mean" else "seq-sum",
        coef=beta,
        return_stats=True,
    )
    weight = log_weight.exp()
    tokens = stats.length.sum().clamp(min=1) if normalizer is None else normalizer
    return (weight * kl).sum() / tokens, stats._replace(kl=weight.detach() * stats.kl)


def sequence_kl(
    old_per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor
) -> Tensor:
    """RLOO's KL of each sequence [B], in nats: the sum of k1 over its kept tokens.

    RLOO subtracts ``beta`` times this from the reward; it can be negative. Differs from TRL: NaN
    under the mask has no effect.
    """
    return fused_kl_penalty(
        old_per_token_logps,
        ref_per_token_logps,
        completion_mask,
        estimator=TRL_RLOO,
        reduction="seq-sum",
    )


def kl_penalty(
    logprob: Tensor, ref_logprob: Tensor, kl_penalty: str = "kl", *, exact: bool = False
) -> Tensor:
    """``PPOTrainer._kl_penalty`` of TRL up to 0.11: per token, in nats, without a mask.

    ``kl_penalty``: ``kl``, ``abs``, ``mse`` (see ``presets.TRL_PPO``), of the shape of ``logprob``;
    or ``full``: the exact KL(policy || reference) of log-probs [..., V] of the whole vocabulary,
    [...], by one read (see ``common.full_kl``). Low-precision inputs give fp32, unless
    ``exact=True``.
    """
    return per_token_or_full(logprob, ref_logprob, kl_penalty, TRL_PPO, exact=exact)


_kl_penalty = kl_penalty
"""TRL's own name for it."""


def _old(logps: Tensor, old: Tensor | None) -> Tensor:
    return logps.detach() if old is None else old
