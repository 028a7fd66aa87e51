"""OpenRLHF, 0.10 to 0.11.2 and its main branch of August 2026."""

from __future__ import annotations

from klfast.compat import openrlhf
from klfast.compat.patching.replacements import replacement
from klfast.compat.patching.sites import (
    KnownCode,
    Site,
    flash_attn,
    is_there,
    known,
    known_compiled,
    stays,
)

_UTILS = "openrlhf.models.utils"
_CONTROLLERS = "openrlhf.trainer.ppo_utils.kl_controller"
_ALL = "0.10 to 0.11.2, main"

_GROUPS = (
    (
        Site(
            f"{_UTILS}:compute_approx_kl",
            (
                KnownCode(
                    "b30f7454ec143071",
                    "0.10, 0.11.0, main",
                    replacement(openrlhf.compute_approx_kl_unweighted),
                ),
                KnownCode("7fb45510c34dfeb7", "0.11.1", replacement(openrlhf.compute_approx_kl)),
                KnownCode("9a31bec1e32b8ff1", "0.11.2", replacement(openrlhf.compute_approx_kl)),
            ),
        ),
    ),
    (known(f"{_UTILS}:compute_reward", "ed3b03fa22353a97", openrlhf.compute_reward, _ALL),),
    (
        known(
            f"{_UTILS}:log_probs_from_logits",
            "66bc5702680a2331",
            openrlhf.log_probs_from_logits,
            _ALL,
            fused=flash_attn(lambda module: is_there("flash_attn")),
        ),
        stays(f"{_UTILS}:_logsumexp_by_chunk", "ae51220665162669", _ALL),
    ),
    (
        known_compiled(
            f"{_UTILS}:compute_entropy", "c3423c739cc25222", openrlhf.compute_entropy, _ALL
        ),
    ),
    (
        known(
            f"{_CONTROLLERS}:AdaptiveKLController",
            "4599c61cfbfc12a6",
            openrlhf.AdaptiveKLController,
            _ALL,
        ),
        known(
            f"{_CONTROLLERS}:FixedKLController",
            "a71d6a7c80f4a142",
            openrlhf.FixedKLController,
            _ALL,
        ),
    ),
)
TARGETS = (_GROUPS,)
