"""trlx 0.7 and main: the KL of ``AcceleratePPOTrainer.make_experience``, and its controllers.

trlx writes its KL inline, so these functions are what to write instead; or call
``klfast.compat.patch("trlx")``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.compat.common import per_token
from klfast.compat.controllers import AdaptiveKLController, FixedKLController, get_kl_controller
from klfast.compat.presets import TRLX
from klfast.functional.penalty import kl_penalty
from klfast.functional.penalty import kl_rewards as klfast_rewards
from klfast.stats.kl import KLStats

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "MeanKL",
    "get_kl_controller",
    "kl_rewards",
    "log_ratio",
    "mean_kl",
]


class MeanKL(NamedTuple):
    """trlx's two averages (0-dim, nats) and the statistics that they were made from.

    Attributes:
        mean_kl_per_token: the sum over kept tokens over the number of *all* slots, masked ones
            included, as trlx does: too small wherever there is padding. ``stats.token_mean()`` is
            the mean over kept tokens.
        mean_kl: the mean over all B sequences of their sums; what the controller gets.
        stats: per-sequence ``klfast.KLStats``; ``stats.k3`` are the sums of the right k3, see
            :func:`mean_kl`.
    """

    mean_kl_per_token: Tensor
    mean_kl: Tensor
    stats: KLStats


torch.serialization.add_safe_globals([MeanKL])


def _slots(attention_mask: Tensor, logprobs: Tensor) -> Tensor:
    """The mask as trlx applies it to log-probs: without its last column."""
    return attention_mask if attention_mask.shape == logprobs.shape else attention_mask[:, :-1]


def log_ratio(
    logprobs: Tensor, ref_logprobs: Tensor, attention_mask: Tensor, *, exact: bool = False
) -> Tensor:
    """``logprobs - ref_logprobs`` [B, T-1] in nats, 0 where masked. See :func:`mean_kl`."""
    mask = _slots(attention_mask, logprobs)
    return per_token(logprobs, ref_logprobs, TRLX["reward"], mask, exact=exact)


def mean_kl(logprobs: Tensor, ref_logprobs: Tensor, attention_mask: Tensor) -> MeanKL:
    """The KL of a batch as trlx estimates it, for its log and its controller.

    ``exp(x) - 1 - x`` with ``x = logprobs - ref_logprobs`` in nats, over the slots that the mask
    keeps.

    Args:
        logprobs: [B, T-1], of tokens 1..T-1 under the policy.
        ref_logprobs: the same under the reference.
        attention_mask: [B, T], whose last column is dropped as trlx does, or [B, T-1]. So slot i,
            which holds the log-prob of token i+1, is kept if token *i* exists: one padding token
            after each sequence counts, and the first token after left padding does not. Pass
            ``attention_mask[:, 1:]`` for the tokens themselves.

    Two things are kept as trlx has them. The formula is k3 with the inverse ratio (klfast's
    ``k3_ref``). On samples of the policy it estimates chi^2(policy || reference) - KL, not the KL.
    And ``mean_kl_per_token`` counts masked slots.
    """
    _, stats = kl_penalty(
        logprobs,
        ref_logprobs,
        _slots(attention_mask, logprobs),
        estimator=TRLX["kl"],
        reduction="seq-sum",
        return_stats=True,
    )
    sequences, slots = logprobs.shape
    per_sequence = stats.kl.mean() if sequences else stats.kl.sum()
    # trlx divides by all slots, masked ones included.
    return MeanKL(per_sequence / max(slots, 1), per_sequence, stats)


def kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    attention_mask: Tensor,
    kl_coef: float,
) -> Tensor:
    """Rewards [B, T-1]: ``-kl_coef * x`` in kept slots, plus ``scores[b]`` in the last of them.

    The arguments are as in :func:`mean_kl`. ``scores`` is [B], and ``kl_coef`` is the controller's
    ``value``, in reward units per nat. trlx cuts each sample's rewards out of this result, from the
    prompt's last slot to one slot past the mask. If that slot exists, trlx puts the score there.
    """
    mask = _slots(attention_mask, logprobs)
    return klfast_rewards(
        scores, logprobs, ref_logprobs, mask, kl_coef=kl_coef, estimator=TRLX["reward"]
    )
