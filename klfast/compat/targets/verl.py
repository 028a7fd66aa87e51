"""verl, 0.6 to 0.9 and its main branch of August 2026 (0.10.0.dev)."""

from __future__ import annotations

import os
from types import ModuleType

from klfast.compat import verl
from klfast.compat.patching.replacements import replacement
from klfast.compat.patching.sites import Form, Site, Target, flash_attn, known, left_on_gpu, stays

_CORE = "verl.trainer.ppo.core_algos"
_FROM_LOGITS = "verl.utils.torch_functional"
_ALL = "0.6 to 0.9, main"

_MASKED_SUM = stays(f"{_FROM_LOGITS}:masked_sum", "1f6f1c6daac8a62a", _ALL)
_MASKED_MEAN = stays(f"{_FROM_LOGITS}:masked_mean", "a833f480d14c6d78", _ALL)
_FORWARD = stays(f"{_CORE}:kl_penalty_forward", "21b857ef8d407206", _ALL)

# Up to 0.7 a name with a "+" is an error of kl_penalty_forward.
_KL_CODES = (
    ("54a41f26e292a888", "0.6, 0.7.0"),
    ("26e3aa9865ad925b", "0.7.1"),
    ("3194e8e3a0b07d41", "0.8, 0.9, main"),
)
_KL_STAYS = Site(f"{_CORE}:kl_penalty", tuple(Form(*code) for code in _KL_CODES))


_flash_attn = flash_attn(
    lambda module: module.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE  # verl's spelling
)


def _flash_attn_unless_disabled(module: ModuleType) -> str | None:
    disabled = os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") == "1"
    return None if disabled else _flash_attn(module)


def _compiled(module: ModuleType) -> str:
    return left_on_gpu("runs under torch.compile (verl's use_torch_compile)")


_LOGPROBS = replacement(verl.logprobs_from_logits)

TARGETS = (
    Target(
        ("verl",),
        _ALL,
        (
            (
                Site(
                    f"{_CORE}:kl_penalty",
                    tuple(Form(*code, replacement(verl.kl_penalty)) for code in _KL_CODES),
                ),
                _FORWARD,
            ),
            (
                Site(  # in 0.7.1 and 0.8 "token-sum" is an error
                    f"{_CORE}:agg_loss",
                    (
                        Form("1b62a3545337f118", "0.7.1, 0.8", replacement(verl.agg_loss)),
                        Form("46f545d605af0451", "0.9, main", replacement(verl.agg_loss)),
                    ),
                ),
                _MASKED_SUM,
            ),
            (
                known(
                    f"{_CORE}:AdaptiveKLController",
                    "20918bb44a36b301",
                    verl.AdaptiveKLController,
                    _ALL,
                ),
                known(
                    f"{_CORE}:FixedKLController", "1c206129c972cfb8", verl.FixedKLController, _ALL
                ),
                known(
                    f"{_CORE}:get_kl_controller", "3f3f2ae7494e4993", verl.get_kl_controller, _ALL
                ),
            ),
            (
                known(
                    "verl.trainer.ppo.ray_trainer:apply_kl_penalty",
                    "9992a9a9c23c6957",
                    verl.apply_kl_penalty,
                    _ALL,
                ),
                _KL_STAYS,
                _FORWARD,
                _MASKED_MEAN,
                _MASKED_SUM,
            ),
            (
                Site(
                    f"{_FROM_LOGITS}:logprobs_from_logits",
                    (
                        Form("2d738604635c2f2d", "0.6 to 0.8", _LOGPROBS, _flash_attn),
                        Form(
                            "55052f8356a158da", "0.9, main", _LOGPROBS, _flash_attn_unless_disabled
                        ),
                    ),
                ),
                stays(f"{_FROM_LOGITS}:logprobs_from_logits_v2", "eb68b39926973cb1", _ALL),
            ),
            (
                known(
                    f"{_FROM_LOGITS}:entropy_from_logits",
                    "a81547a47a26577e",
                    verl.entropy_from_logits,
                    _ALL,
                    fused=_compiled,
                ),
            ),
            (
                known(
                    f"{_FROM_LOGITS}:entropy_from_logits_with_chunking",
                    "8238e2ad26ad701e",
                    verl.entropy_from_logits_with_chunking,
                    _ALL,
                ),
            ),
        ),
        exact=True,
    ),
)
