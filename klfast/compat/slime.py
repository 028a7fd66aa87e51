"""slime: ``slime.utils.ppo_utils.compute_approx_kl``, and the KL of its loss and of its rewards.

Its main branch of August 2026. Use ``from klfast.compat.slime import compute_approx_kl`` in place
of slime's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from klfast.api import kl_penalty as fused_kl_penalty
from klfast.api import kl_rewards as fused_kl_rewards
from klfast.compat.common import choose
from klfast.compat.presets import SLIME
from klfast.compat.weighted import weighted_per_token
from klfast.names import ReductionName

__all__ = ["compute_approx_kl", "kl_loss", "kl_rewards"]


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    kl_loss_type: str,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """The per-token KL of slime, fp32, in nats, of the shape of ``log_probs``, without a mask.

    ``kl_loss_type``: ``k1``, ``k2``, ``k3`` or ``low_var_kl`` (see ``presets.SLIME``), times
    ``importance_ratio``; ``low_var_kl`` limits the product to 10, and where it does nothing has a
    gradient. :func:`kl_loss` takes the old log-probs in place of the ratio, and reads once.

    Differs from slime: k3 keeps its digits near 0; the gradient of ``low_var_kl`` is 0, not NaN,
    where exp overflows (log-ratios below -88); fp64 stays fp64; a ratio of another shape is a
    ValueError, where slime broadcasts. There is nothing to compile.
    """
    estimator = choose("kl_loss_type", kl_loss_type, SLIME)
    return weighted_per_token(
        log_probs, log_probs_base, estimator, importance_ratio, argument="importance_ratio"
    )


def kl_loss(
    log_probs: Tensor,
    log_probs_base: Tensor,
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    kl_loss_type: str = "k1",
    *,
    old_log_probs: Tensor | None = None,
    kl_loss_coef: float = 1.0,
    rollout_mask_sums: Tensor | Sequence[float] | None = None,
    calculate_per_token_loss: bool = False,
) -> Tensor:
    """The KL term of slime's loss (0-dim, nats times ``kl_loss_coef``) in one read.

    ``kl_loss_coef * sum_of_sample_mean(compute_approx_kl(...))``, without context parallelism; 0 of
    no samples.

    Args:
        log_probs: [N], of the samples' responses one after the other, under the policy.
        log_probs_base: [N], under the reference.
        response_lengths: of the S samples.
        loss_masks: their masks, [length] each, of zeros and ones; what a masked token holds,
            NaN too, has no effect.
        kl_loss_type: see :func:`compute_approx_kl`.
        old_log_probs: [N]: ``--use-unbiased-kl``, whose ratio ``exp(log_probs - old_log_probs)`` is
            differentiable.
        kl_loss_coef: the coefficient.
        rollout_mask_sums: [S], what each sample's sum is divided by, its own number of kept tokens
            by default.
        calculate_per_token_loss: sum over tokens, divided by nothing.

    Differs from slime: NaN under the mask has no effect; with ``low_var_kl`` an infinite ratio
    counts as 0, where theirs is 10, or NaN, with a gradient of NaN.
    """
    reduction: ReductionName = "seq-mean" if rollout_mask_sums is None else "seq-sum"
    of_samples = fused_kl_penalty(
        log_probs,
        log_probs_base,
        torch.cat(list(loss_masks)) if len(loss_masks) else log_probs.new_ones(0),
        estimator=choose("kl_loss_type", kl_loss_type, SLIME),
        reduction="token-sum" if calculate_per_token_loss else reduction,
        cu_seqlens=_cu_seqlens(response_lengths, log_probs),
        old_logprobs=old_log_probs,
        coef=kl_loss_coef,
    )
    if calculate_per_token_loss:
        return of_samples
    if rollout_mask_sums is not None:
        denominators = torch.as_tensor(rollout_mask_sums, device=of_samples.device)
        of_samples = of_samples / denominators.clamp(min=1)
    return of_samples.sum()


def kl_rewards(
    rewards: Sequence[float] | Tensor,
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor] | None = None,
    *,
    kl_coef: float,
    kl_loss_type: str = "k1",
) -> list[Tensor]:
    """The rewards of each sample's tokens, [length] each, without context parallelism.

    ``-kl_coef * compute_approx_kl(...)`` at every token, plus the sample's reward at the last. With
    ``loss_masks``, as its REINFORCE++ has it: 0 where masked, the reward at the last kept token
    (none for a sample without any, where slime fails); without, as its PPO. ``kl_coef`` is in
    reward units per nat. No gradient.
    """
    if len(log_probs) == 0:
        return []
    lengths = [len(sample) for sample in log_probs]
    logprobs = torch.cat(list(log_probs))
    scores = torch.as_tensor(rewards, dtype=torch.float32, device=logprobs.device)
    shaped = fused_kl_rewards(
        scores,
        logprobs,
        torch.cat(list(ref_log_probs)),
        None if loss_masks is None else torch.cat(list(loss_masks)),
        kl_coef=kl_coef,
        estimator=choose("kl_loss_type", kl_loss_type, SLIME),
        cu_seqlens=_cu_seqlens(lengths, logprobs),
    )
    return list(torch.split(shaped, lengths))


def _cu_seqlens(lengths: Sequence[int], like: Tensor) -> Tensor:
    """Where each sample starts, and the last ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=like.device)
