"""TRL's functions over log-probs: the KL of GRPO, RLOO and the older PPO, vLLM's correction.

``klfast.compat.trl`` exports them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from klfast.args.checks import check_choice, check_number
from klfast.args.estimator import Estimator, as_estimator
from klfast.compat.common import per_token
from klfast.compat.divergences import per_token_or_full
from klfast.compat.presets import TRL_GRPO, TRL_PPO, TRL_RLOO
from klfast.functional.penalty import kl_penalty as fused_kl_penalty
from klfast.functional.rollout import rollout_correction
from klfast.stats.kl import KLStats, divide
from klfast.stats.rollout import greatest, least
from klfast.types.names import EstimatorName, ReductionName

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

    With ``use_bias_correction_kl`` (TRL's default since 1.10) w is the ratio
    ``exp(per_token_logps - old_per_token_logps)``, differentiable, with the policy itself for the
    old one if it is None: a weight of 1 that turns k3's gradient into the reverse KL's. Without it
    w is 1. ``importance_sampling_level="sequence"`` is :func:`kl_loss`'s.
    """
    old = _old(per_token_logps, old_per_token_logps) if use_bias_correction_kl else None
    return per_token(per_token_logps, ref_per_token_logps, TRL_GRPO, old_logprobs=old, exact=exact)


def _old(logps: Tensor, old: Tensor | None) -> Tensor:
    return logps.detach() if old is None else old


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
    estimator: EstimatorName | Estimator = TRL_GRPO,
) -> tuple[Tensor, KLStats]:
    """The KL term of GRPO's loss: per-token KL, mask, mean and ``beta`` in one read.

    Args:
        per_token_logps: [B, T], of the policy.
        ref_per_token_logps: [B, T], of the reference.
        mask: [B, T].
        beta: the coefficient.
        loss_type: how tokens are averaged. ``grpo`` and ``sapo`` take the mean over all B sequences
            of their means, ``luspo`` the mean of their sums. ``bnpo`` takes the mean over tokens.
            ``dr_grpo``, ``cispo``, ``dapo`` and ``vespo`` take the sum over tokens /
            ``normalizer``.
        normalizer: of the last four. For ``dr_grpo`` it is B * max_completion_length. For the
            others it is the token count of all ranks, gradient accumulation included, divided by
            the number of ranks, because their gradients are averaged.
        old_per_token_logps: see :func:`per_token_kl`, like the next.
        use_bias_correction_kl: see there.
        importance_sampling_level: ``"token"`` is a weight per token. ``"sequence"`` is one weight
            per sequence, the exp of the mean of its log-ratios (GSPO).
        estimator: TRL's k3, or a name such as ``"k3+"`` or a ``klfast.Estimator`` in its place,
            with the same weights. Its ``importance`` and ``importance_cap`` say how these enter.
            ``clip_weighted`` needs a weight per token.

    Returns:
        The loss (0-dim, nats * beta), before TRL's division by the gradient accumulation steps, and
        the ``klfast.KLStats`` of the same read, whose ``kl`` carries the weights: TRL's metric
        ``kl`` is ``stats.kl.sum() / stats.length.sum()``.
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
    given = per_token_logps, ref_per_token_logps, mask
    chosen = as_estimator(estimator)
    options: Any = {"estimator": chosen, "coef": beta, "return_stats": True}
    if old is None or importance_sampling_level == "token":
        options |= {"old_logprobs": old, "normalizer": normalizer}
        term, stats = fused_kl_penalty(*given, reduction=reduction, **options)
        return term, stats
    if chosen.clip_weighted:
        raise ValueError(
            "estimator must have clip_weighted=False with one weight per sequence, "
            f"importance_sampling_level='sequence', got {chosen!r}"
        )
    # GSPO's weight of a sequence depends on all its tokens, so the KL takes a second read.
    log_weight = fused_kl_penalty(
        per_token_logps, old.detach(), mask, estimator="k1", reduction="seq-mean"
    )
    per_sequence: ReductionName = "seq-mean" if reduction == "seq-mean-token-mean" else "seq-sum"
    kl, stats = fused_kl_penalty(*given, reduction=per_sequence, **options)
    weight = log_weight.exp().clamp(max=chosen.importance_cap or math.inf)
    if chosen.importance == "detached":
        weight = weight.detach()
    tokens = stats.length.sum().clamp(min=1) if normalizer is None else normalizer
    return (weight * kl).sum() / tokens, stats._replace(kl=weight.detach() * stats.kl)


def per_token_k1(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """Policy - reference, 0 where masked, for RLOO's metric."""
    return per_token(logps, ref_logps, TRL_RLOO, mask)


def sequence_kl(
    old_per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor
) -> Tensor:
    """RLOO's KL of each sequence [B], in nats: the sum of k1 over its kept tokens.

    RLOO subtracts ``beta`` times this from the reward; it can be negative.
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

    ``kl_penalty`` is ``kl``, ``abs`` or ``mse`` (see ``presets.TRL_PPO``), with a result of the
    shape of ``logprob``, or ``full``. ``full`` takes log-probs [..., V] of the whole vocabulary and
    gives the exact KL(policy || reference), [...], by one read (see ``divergences.full_kl``).
    """
    return per_token_or_full(logprob, ref_logprob, kl_penalty, TRL_PPO, exact=exact)


# ``vllm_importance_sampling_mode``: what corrects GRPO's loss for vLLM's log-probs


MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
"""``vllm_importance_sampling_mode`` -> (``weight``, ``outside``)."""

SEQUENCE_MODES = ("sequence_truncate", "sequence_mask")

_DIFFERENCE = "sampling/sampling_logp_difference/{}".format
_RATIO = "sampling/importance_sampling_ratio/{}".format
METRICS = {
    _DIFFERENCE("mean"): "mean",
    _DIFFERENCE("max"): "amax",
    _RATIO("min"): "amin",
    _RATIO("mean"): "mean",
    _RATIO("max"): "amax",
}
"""Name -> the function by which TRL combines the numbers of all ranks."""

Metrics = dict[str, Tensor]


@torch.no_grad()
def importance_sampling_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    tool_mask: Tensor | None = None,
    *,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> tuple[Tensor, Metrics]:
    """The ratio that multiplies the loss of TRL's GRPO, and the logged metrics, from one read.

    With x = old_per_token_logps - sampling_per_token_logps in nats, the ratio is exp(x) of each
    token or exp(sum of x) of a sequence, moved into [clip_min, clip_max] (``*_truncate``) or 0
    outside (``*_mask``). A masked token has TRL's ratio of x = 0. So has a token whose log-prob is
    NaN because vLLM has not scored it (since TRL 1.11; in 1.10 the loss is then NaN). The ratio
    ends at exp(20) and exp(-20). An infinite log-prob is treated as NaN. Only in a sequence mode a
    policy's -inf is a ratio of 0.

    Args:
        old_per_token_logps: under the policy that starts the step, [B, T].
        sampling_per_token_logps: of the same tokens, as vLLM reports them, [B, T].
        completion_mask: 0 where there is no token, [B, T].
        tool_mask: 0 at the tokens that a tool has written, [B, T].
        mode: ``vllm_importance_sampling_mode``: ``"token_truncate"``, ``"token_mask"``,
            ``"sequence_truncate"`` or ``"sequence_mask"``.
        clip_min: ``vllm_importance_sampling_clip_min``. None, or a number <= 0, means no bound.
        clip_max: ``vllm_importance_sampling_clip_max`` (``vllm_importance_sampling_cap`` until TRL
            1.5), > 0. None means no bound.

    Returns:
        The ratio, [B, T], or [B, 1] in a sequence mode, in fp32, or fp64 for fp64 input. The
        metrics of this process under TRL's names, 0-dim. They are the mean and greatest abs(x) of
        the scored tokens, and the least, mean and greatest ratio of the kept tokens or of all
        sequences. Without tokens they are 0.

    Raises:
        ValueError: an unknown mode, ``clip_min > clip_max``, a ``clip_max`` that is not > 0, or a
            mode that truncates without a bound.

    Source: ``GRPOTrainer._generate_and_score_completions`` of TRL 1.10 to 1.16.
    """
    check_choice("mode", mode, tuple(MODES))
    weight, outside = MODES[mode]
    if outside == "truncate" and clip_min is None and clip_max is None:
        raise ValueError(f"clip_min or clip_max must be given with mode={mode!r}, got neither")
    # A ratio is > 0, so that a bound <= 0 has no effect.
    floor = clip_min if clip_min is not None and clip_min > 0 else None
    if clip_max is not None:
        check_number("clip_max", clip_max, above=0)
        if floor is not None and floor > clip_max:
            raise ValueError(f"clip_min must be <= clip_max={clip_max}, got {clip_min!r}")
    mask = completion_mask if tool_mask is None else completion_mask * tool_mask
    weights, kept, stats = rollout_correction(
        old_per_token_logps,
        sampling_per_token_logps,
        mask.bool(),
        weight=weight,
        floor=floor,
        cap=clip_max,
        outside=outside,
    )
    assert weights is not None
    scored = stats.tokens - stats.nonfinite  # the tokens of each sequence with a finite x
    extreme = torch.maximum(stats.max_log_ratio, -stats.min_log_ratio)
    metrics = {
        _DIFFERENCE("mean"): divide(stats.abs.sum(), scored.sum()),
        _DIFFERENCE("max"): greatest(extreme, scored > 0),
    }
    # TRL's ratio where x is 0, which masked tokens and those without a log-prob have.
    bounded = min(
        max(1.0, -math.inf if clip_min is None else clip_min),
        math.inf if clip_max is None else clip_max,
    )
    one = bounded if outside == "truncate" or bounded == 1.0 else 0.0
    has_scored = scored > 0
    if weight == "token":
        ratio = torch.where(kept, weights, one)
        exist, number = stats.tokens > 0, stats.tokens.sum()
        total = stats.weight.sum() + one * stats.nonfinite.sum()
        has_one, low, high = stats.nonfinite > 0, stats.min_weight, stats.max_weight
        low = torch.where(has_scored, torch.where(has_one, low.clamp(max=one), low), one)
        high = torch.where(has_scored, torch.where(has_one, high.clamp(min=one), high), one)
    else:
        low = high = torch.where(has_scored, stats.max_weight, one)
        ratio, total = low[:, None], low.sum()
        # TRL counts sequences without a token too.
        exist, number = torch.ones_like(low) > 0, torch.ones_like(low).sum()
    return ratio, metrics | {
        _RATIO("min"): least(low, exist),
        _RATIO("mean"): divide(total, number),
        _RATIO("max"): greatest(high, exist),
    }
