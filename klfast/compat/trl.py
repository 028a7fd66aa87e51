"""TRL: ``GRPOTrainer``, ``RLOOTrainer``, what ``trl.trainer.utils`` makes of logits, and the
distillation losses of GKD, SDFT and SDPO, of 1.10 to 1.16; ``PPOTrainer`` of 0.6 to 0.11.

TRL 1.x writes its KL inline. Either make a trainer whose KL is klfast's,
``class Trainer(klfast.compat.trl.GRPOMixin, trl.GRPOTrainer): pass``, or call
``klfast.compat.patch("trl")``, which serves GRPO and RLOO, the trainers that take log-probs from
logits (those two never have logits), GKD, SDFT and SDPO, and GRPO's correction for vLLM's
log-probs, of which ``RLOOSamplingMixin`` gives one to RLOO. ``AdaptiveKLCallback`` steers the
``beta`` of GRPO and RLOO, patched or not. The functions here are what they are made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klfast.compat.controllers import AdaptiveKLController, FixedKLController
from klfast.compat.trl_distillation import (
    compute_divergence,
    compute_full_logit_self_distillation_loss,
    generalized_jsd_loss,
)
from klfast.compat.trl_logits import (
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)
from klfast.compat.trl_losses import (
    LEVELS,
    REDUCTIONS,
    kl_loss,
    kl_penalty,
    per_token_kl,
    sequence_kl,
)
from klfast.compat.trl_sampling import importance_sampling_ratio
from klfast.compat.trl_topk import (
    add_tail_bucket,
    add_tail_bucket_and_mask,
    compute_topk_self_distillation_loss,
    iw_opd_generalized_jsd_loss,
)

if TYPE_CHECKING:
    from klfast.compat.trl_callback import AdaptiveKLCallback
    from klfast.compat.trl_sampling_trainers import RLOOSamplingMixin
    from klfast.compat.trl_trainers import GRPOMixin

__all__ = [
    "LEVELS",
    "REDUCTIONS",
    "AdaptiveKLCallback",
    "AdaptiveKLController",
    "FixedKLController",
    "GRPOMixin",
    "RLOOSamplingMixin",
    "add_tail_bucket",
    "add_tail_bucket_and_mask",
    "compute_divergence",
    "compute_full_logit_self_distillation_loss",
    "compute_topk_self_distillation_loss",
    "entropy_from_logits",
    "generalized_jsd_loss",
    "importance_sampling_ratio",
    "iw_opd_generalized_jsd_loss",
    "kl_loss",
    "kl_penalty",
    "per_token_kl",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
    "sequence_kl",
]


def __getattr__(name: str) -> Any:
    """Classes that need TRL or transformers are imported when they are first asked for."""
    if name == "GRPOMixin":
        from klfast.compat.trl_trainers import GRPOMixin

        return GRPOMixin
    if name == "RLOOSamplingMixin":
        from klfast.compat.trl_sampling_trainers import RLOOSamplingMixin

        return RLOOSamplingMixin
    if name == "AdaptiveKLCallback":
        from klfast.compat.trl_callback import AdaptiveKLCallback

        return AdaptiveKLCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
