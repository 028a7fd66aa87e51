"""ms-swift: the KL that its GRPO trainers write inline, its entropies, and its distillation losses.

``per_token_kl`` and ``sequence_kl`` are what the trainers' lines say; the log-probs that it takes
from TRL are ``klfast.compat.trl``'s.
"""

from __future__ import annotations

from torch import Tensor

from klfast.api import kl_penalty as fused_kl_penalty
from klfast.compat.common import per_token
from klfast.compat.ms_swift_distillation import gkd_loss, jsd_loss
from klfast.compat.presets import MS_SWIFT
from klfast.compat.shards import vocab_parallel_kl_div
from klfast.compat.trl_logits import entropy_from_logits

__all__ = [
    "entropy_from_logits",
    "gkd_loss",
    "jsd_loss",
    "per_token_k1",
    "per_token_kl",
    "sequence_kl",
    "vocab_parallel_kl_div",
]


def per_token_kl(
    per_token_logps: Tensor, ref_per_token_logps: Tensor, *, exact: bool = False
) -> Tensor:
    """k3 of every token [B, T], in nats: the log-ratio limited to 20, the value to 10.

    Differs from ms-swift: digits near 0; fp32 for lower dtypes unless ``exact=True``. Like
    ms-swift's, the gradient is 0 once ``per_token_logps - ref_per_token_logps < -2.61``.
    """
    return per_token(per_token_logps, ref_per_token_logps, MS_SWIFT["k3"], exact=exact)


def per_token_k1(
    old_per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """k1 of every token [B, T], in nats, 0 where masked: that of ``kl_in_reward``."""
    return per_token(
        old_per_token_logps, ref_per_token_logps, MS_SWIFT["k1"], completion_mask, exact=exact
    )


def sequence_kl(
    old_per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor
) -> Tensor:
    """The KL of each sequence [B], in nats: the sum of k1 over its kept tokens.

    With ``kl_in_reward`` ms-swift subtracts ``beta`` times this from the reward; it can be
    negative. Differs from ms-swift: NaN under the mask has no effect; fp32 for lower dtypes.
    """
    return fused_kl_penalty(
        old_per_token_logps,
        ref_per_token_logps,
        completion_mask,
        estimator=MS_SWIFT["k1"],
        reduction="seq-sum",
    )
