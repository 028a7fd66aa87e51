"""AReaL: ``areal.utils.data.KLEstimator``, the KL in the rewards of its PPO actor, and what
``areal.utils.functional`` makes of logits.

Its main branch of May 2026. Use ``from klfast.compat.areal import KLEstimator, ...`` in place of
AReaL's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, distributed

from klfast.api import kl_penalty as fused_kl_penalty
from klfast.compat import logits as over_logits
from klfast.compat.common import choose, per_token
from klfast.compat.presets import AREAL
from klfast.estimator import Estimator
from klfast.logits.api import token_logprobs

__all__ = ["KLEstimator", "gather_logprobs", "gather_logprobs_entropy", "kl_rewards"]


class KLEstimator:
    """AReaL's per-token KL, fp32, in nats, of the shape of ``log_probs``; there is no mask here.

    Args:
        kl_estimator: ``k1``, ``k2`` or ``k3`` (see ``presets.AREAL``).
        apply_clamp: limit it to [-10, 10]; where that acts there is no gradient (k3: once the
            log-ratio is < -2.61).

    Differs from AReaL: k3 keeps its digits near 0, its gradient is 0, not NaN, where exp overflows
    under the limit (log-ratios below -88), and fp64 stays fp64. An unknown name is a ValueError in
    the static method too.
    """

    def __init__(self, kl_estimator: str = "k1", apply_clamp: bool = True) -> None:
        _estimator(kl_estimator, apply_clamp)
        self.kl_estimator = kl_estimator
        self.apply_clamp = apply_clamp

    def __call__(self, log_probs: Tensor, log_probs_base: Tensor) -> Tensor:
        """The KL of every token."""
        return self._compute_approx_kl(
            log_probs, log_probs_base, self.kl_estimator, self.apply_clamp
        )

    @staticmethod
    def _compute_approx_kl(
        log_probs: Tensor,
        log_probs_base: Tensor,
        kl_estimator: str = "k1",
        apply_clamp: bool = True,
    ) -> Tensor:
        """The same without an object: AReaL's rejection sampling calls it."""
        return per_token(log_probs, log_probs_base, _estimator(kl_estimator, apply_clamp))


def _estimator(kl_estimator: str, apply_clamp: bool) -> Estimator:
    estimator = choose("kl_estimator", kl_estimator, AREAL)
    return estimator if apply_clamp else replace(estimator, kl_clip=None)


@torch.no_grad()
def kl_rewards(
    reward_score: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    loss_mask: Tensor,
    attention_mask: Tensor,
    *,
    kl_ctl: float = 0.1,
    kl_estimator: str = "k1",
    mask_no_eos_with_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """(``kl_rewards``, ``tot_rewards``) of AReaL's PPO actor, [B, T] each; no gradient.

    ``kl_rewards`` are ``-kl_ctl * KLEstimator(kl_estimator)(old_logp, ref_logp)``, 0 where masked.
    ``tot_rewards`` are the same, but 0 in the slot of the last token that the attention mask keeps,
    and with ``reward_score[b]`` added in the slot before it (the first, if there is none).

    Args:
        reward_score: [B], scaled and limited.
        old_logp: [B, T], slot i of token i+1, as the actor has rolled it.
        ref_logp: like ``old_logp``.
        loss_mask: [B, T] of zeros and ones, rolled too.
        attention_mask: [B, T] of the tokens, not rolled.
        kl_ctl: the coefficient, in reward units per nat.
        kl_estimator: see :class:`KLEstimator`.
        mask_no_eos_with_zero: no score for sequences that fill all T slots.

    Differs from AReaL: NaN under the mask has no effect, and the inputs are not changed (theirs are
    multiplied by the mask in place).
    """
    of_kl = fused_kl_penalty(
        old_logp,
        ref_logp,
        loss_mask,
        estimator=_estimator(kl_estimator, apply_clamp=True),
        coef=-kl_ctl,
    )
    lengths = attention_mask.sum(-1).long()
    rows = torch.arange(len(lengths), device=lengths.device)
    if mask_no_eos_with_zero:
        reward_score = torch.where(lengths == attention_mask.shape[1], 0.0, reward_score)
    rewards = of_kl.clone()
    rewards[rows, lengths - 1] = 0
    rewards[rows, (lengths - 2).clamp(min=0)] += reward_score.to(rewards.dtype)
    return of_kl, rewards


def gather_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: distributed.ProcessGroup | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Log-probs of the labels [...] under softmax(logits / temperature), [..., V], fp32, in nats.

    By one read, where AReaL copies the logits in fp32, chunk by chunk; ``chunk_size`` is ignored.
    ``tp_group`` must be None or of one rank: logits of a part of the vocabulary are a ValueError.
    Differs from AReaL: fp64 stays fp64.
    """
    _check_group(tp_group)
    return over_logits.token_logprobs(logits, labels, temperature=temperature)


def gather_logprobs_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: distributed.ProcessGroup | None = None,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """(log-probs of the labels, entropies), [...] each, in nats, as :func:`gather_logprobs`.

    Both come from one read.

    Differs from AReaL besides: a logit of -inf adds 0 to the entropy, where theirs gives NaN.
    """
    _check_group(tp_group)
    return token_logprobs(logits, labels, temperature=temperature, return_entropy=True)


def _check_group(tp_group: distributed.ProcessGroup | None) -> None:
    if tp_group is not None and (ranks := distributed.get_world_size(tp_group)) > 1:
        raise ValueError(f"tp_group must be None or of one rank, got {ranks} ranks")
