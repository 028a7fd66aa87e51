"""TRL's ``vllm_importance_sampling_mode``: what corrects GRPO's loss for vLLM's log-probs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from klfast.checks.arguments import check_choice, check_number
from klfast.rollout.api import rollout_correction
from klfast.rollout.stats import RolloutStats, divide, greatest, least

MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
"""``vllm_importance_sampling_mode`` -> (``weight``, ``outside``)."""

SEQUENCE_MODES = ("sequence_truncate", "sequence_mask")

METRICS = {
    "sampling/sampling_logp_difference/mean": "mean",
    "sampling/sampling_logp_difference/max": "amax",
    "sampling/importance_sampling_ratio/min": "amin",
    "sampling/importance_sampling_ratio/mean": "mean",
    "sampling/importance_sampling_ratio/max": "amax",
}
"""Name -> how TRL makes one number of those of all ranks."""

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
    """The ratio that TRL's GRPO multiplies its loss by, and what it logs of it, from one read.

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
        clip_min: ``vllm_importance_sampling_clip_min``; None, or not > 0: no bound.
        clip_max: ``vllm_importance_sampling_clip_max`` (``vllm_importance_sampling_cap`` until TRL
            1.5), > 0; None: no bound.

    Returns:
        The ratio, [B, T], or [B, 1] of a sequence; fp32, or fp64 for fp64 input. The metrics of
        this process under TRL's names, 0-dim: mean and greatest abs(x) of the scored tokens; least,
        mean and greatest ratio, of the kept tokens or of all sequences. Of no token they are 0.

    Raises:
        ValueError: an unknown mode, ``clip_min > clip_max``, a ``clip_max`` that is not > 0, or a
            mode that truncates without a bound.

    Source: ``GRPOTrainer._generate_and_score_completions`` of TRL 1.10 to 1.16.
    """
    check_choice("mode", mode, tuple(MODES))
    weight, outside = MODES[mode]
    if outside == "truncate" and clip_min is None and clip_max is None:
        raise ValueError(f"clip_min or clip_max must be given with mode={mode!r}, got neither")
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
    one = _of_no_difference(outside, clip_min, clip_max)
    if weight == "token":
        return torch.where(kept, weights, one), {**_differences(stats), **_of_tokens(stats, one)}
    ratio = torch.where(_scored(stats) > 0, stats.max_weight, one)
    return ratio[:, None], {**_differences(stats), **_of_sequences(ratio)}


def _of_no_difference(outside: str, clip_min: float | None, clip_max: float | None) -> float:
    """TRL's ratio where x is 0."""
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    bounded = min(max(1.0, low), high)
    return bounded if outside == "truncate" or bounded == 1.0 else 0.0


def _scored(stats: RolloutStats) -> Tensor:
    """How many tokens of each sequence have a finite x."""
    return stats.tokens - stats.nonfinite


def _differences(stats: RolloutStats) -> Metrics:
    scored = _scored(stats)
    extreme = torch.maximum(stats.max_log_ratio, -stats.min_log_ratio)
    return {
        "sampling/sampling_logp_difference/mean": divide(stats.abs.sum(), scored.sum()),
        "sampling/sampling_logp_difference/max": greatest(extreme, scored > 0),
    }


def _of_tokens(stats: RolloutStats, one: float) -> Metrics:
    """Extremes and mean over kept tokens; those that are not scored have the ratio ``one``."""
    is_there, scored, unscored = stats.tokens > 0, _scored(stats) > 0, stats.nonfinite > 0
    low, high = stats.min_weight, stats.max_weight
    low = torch.where(scored, torch.where(unscored, low.clamp(max=one), low), one)
    high = torch.where(scored, torch.where(unscored, high.clamp(min=one), high), one)
    total = stats.weight.sum() + one * stats.nonfinite.sum()
    return {
        "sampling/importance_sampling_ratio/min": least(low, is_there),
        "sampling/importance_sampling_ratio/mean": divide(total, stats.tokens.sum()),
        "sampling/importance_sampling_ratio/max": greatest(high, is_there),
    }


def _of_sequences(ratio: Tensor) -> Metrics:
    """The same over all sequences, those without a token too."""
    every = torch.ones_like(ratio)
    return {
        "sampling/importance_sampling_ratio/min": least(ratio, every > 0),
        "sampling/importance_sampling_ratio/mean": divide(ratio.sum(), every.sum()),
        "sampling/importance_sampling_ratio/max": greatest(ratio, every > 0),
    }
