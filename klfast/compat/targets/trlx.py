"""trlx, whose releases are git tags: v0.7.0 and its main branch; of v0.6.0 the controllers."""

from __future__ import annotations

from klfast.compat import trlx
from klfast.compat.patching.replacements import rewriting
from klfast.compat.patching.sites import KnownCode, Site, known

_MODELS = "trlx.models.modeling_ppo"

# The averages are of what the second statement makes, so they are replaced with it.
_MAKE_EXPERIENCE = {
    "log_ratio = (logprobs - ref_logprobs) * attention_mask[:, :-1]": (
        "log_ratio = klfast.log_ratio(logprobs, ref_logprobs, attention_mask)"
    ),
    "kl = log_ratio.exp() - 1 - log_ratio": (
        "kl = klfast.mean_kl(logprobs, ref_logprobs, attention_mask)"
    ),
    "mean_kl_per_token = kl.mean()": "mean_kl_per_token = kl.mean_kl_per_token",
    "mean_kl = kl.sum(1).mean()": "mean_kl = kl.mean_kl",
}

_GROUPS = (
    (
        known(
            f"{_MODELS}:AdaptiveKLController",
            "69113a2064d3257d",
            trlx.AdaptiveKLController,
            "v0.6.0, v0.7.0, main",
        ),
        known(
            f"{_MODELS}:FixedKLController",
            "a71d6a7c80f4a142",
            trlx.FixedKLController,
            "v0.6.0, v0.7.0, main",
        ),
    ),
    (
        Site(
            "trlx.trainer.accelerate_ppo_trainer:AcceleratePPOTrainer.make_experience",
            (KnownCode(None, "v0.7.0, main", rewriting(_MAKE_EXPERIENCE, trlx)),),
        ),
    ),
)
TARGETS = (_GROUPS,)
