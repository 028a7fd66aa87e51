"""SkyRL, skyrl 0.1 to 0.3 and its main branch of August 2026."""

from __future__ import annotations

from klfast.compat import skyrl
from klfast.compat.patching.replacements import replacement
from klfast.compat.patching.sites import KnownCode, Site, flash_attn, known, stays

_PPO = "skyrl.backends.skyrl_train.utils.ppo_utils"
_TORCH = "skyrl.backends.skyrl_train.utils.torch_utils"
_ALL = "0.1 to 0.3, main"

# In 0.1 it has no gradient, under a decorator: that one is left alone.
_KL_CODES = (("c3230d7b0456050e", "0.2"), ("1ad5bff2dde325ff", "0.3, main"))
_KL = replacement(skyrl.compute_approx_kl)
_REWARD = replacement(skyrl.apply_reward_kl_penalty)
_ENTROPY = replacement(skyrl.chunked_entropy_from_logits)

_flash_attn = flash_attn(lambda module: module.FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE)

_GROUPS = (
    (Site(f"{_PPO}:compute_approx_kl", tuple(KnownCode(*code, _KL) for code in _KL_CODES)),),
    (
        known(f"{_PPO}:AdaptiveKLController", "4599c61cfbfc12a6", skyrl.AdaptiveKLController, _ALL),
        known(f"{_PPO}:FixedKLController", "a71d6a7c80f4a142", skyrl.FixedKLController, _ALL),
        known(f"{_PPO}:get_kl_controller", "58fcc7e7adac9233", skyrl.get_kl_controller, _ALL),
    ),
    (
        Site(
            "skyrl.train.trainer:RayPPOTrainer.apply_reward_kl_penalty",
            (
                KnownCode("db9cb4e3ee26b812", "0.2, 0.3", _REWARD),
                KnownCode("07965a90601894bd", "main", _REWARD),
            ),
        ),
        Site(f"{_PPO}:compute_approx_kl", tuple(KnownCode(*code) for code in _KL_CODES)),
        stays(f"{_TORCH}:masked_mean", "41d4c44f9a8a85f8", _ALL),
    ),
    (
        known(
            f"{_TORCH}:logprobs_from_logits",
            "d2bd2e7d0b976a6a",
            skyrl.logprobs_from_logits,
            _ALL,
            fused=_flash_attn,
        ),
        stays(f"{_TORCH}:logprobs_from_logits_v2", "870d349960e72b17", _ALL),
        stays(f"{_TORCH}:logprobs_from_logits_flash_attn", "eea9cff2f93bb845", _ALL),
    ),
    (
        Site(
            f"{_TORCH}:chunked_entropy_from_logits",
            (
                KnownCode("a4cf7868d2d45825", "0.1, 0.2", _ENTROPY),
                KnownCode("d5213f3f61bd6ab4", "0.3, main", _ENTROPY),
            ),
        ),
    ),
)
TARGETS = (_GROUPS,)
