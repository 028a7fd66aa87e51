"""open-instruct, whose releases are git tags: v0.1.0 to v0.3.0 and its main branch of August 2026.

GRPO's loss makes all four estimators and takes one: klfast makes the one.
"""

from __future__ import annotations

from klfast.compat import open_instruct
from klfast.compat.patching.replacements import rewriting
from klfast.compat.patching.sites import Form, Site, Target, known, known_compiled, stays

_UTILS = "open_instruct.model_utils"
_ALL = "v0.1.0 to v0.3.0, main"
_SINCE_020 = "v0.2.0 to v0.3.0, main"
_ESTIMATE_KL = "3a1d509398b6d143"

_GRPO_LOSS = {
    "ref_logprobs_diff = (new_logprobs - ref_logprobs).clamp(-40.0, 40.0)": (
        "ref_logprobs_diff = None"
    ),
    "kl_all = model_utils.estimate_kl(ref_logprobs_diff, ratio)": "kl_all = None",
    "kl = kl_all[config.kl_estimator]": (
        "kl = klfast.per_token_kl("
        "new_logprobs, ref_logprobs, kl_estimator=config.kl_estimator, ratio=ratio)"
    ),
}

TARGETS = (
    Target(
        ("open_instruct",),
        _ALL,
        (
            (known(f"{_UTILS}:estimate_kl", _ESTIMATE_KL, open_instruct.estimate_kl, _ALL),),
            (
                Site(
                    "open_instruct.grpo_utils:compute_grpo_loss",
                    (Form(None, _SINCE_020, rewriting(_GRPO_LOSS, open_instruct)),),
                    absent="as open-instruct v0.1.0, whose loss is elsewhere",
                ),
                stays(f"{_UTILS}:estimate_kl", _ESTIMATE_KL, _SINCE_020),
            ),
            (
                known_compiled(
                    f"{_UTILS}:log_softmax_and_gather",
                    "7b6d4eb29c2909fa",
                    open_instruct.log_softmax_and_gather,
                    _ALL,
                ),
            ),
            (
                known(
                    f"{_UTILS}:entropy_from_logits",
                    "a81547a47a26577e",
                    open_instruct.entropy_from_logits,
                    _ALL,
                ),
            ),
        ),
        exact=True,
        distribution="open-instruct",
    ),
)
