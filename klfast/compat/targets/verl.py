"""verl, 0.6 to 0.9 and its main branch of August 2026 (0.10.0.dev)."""

from __future__ import annotations

import os
from types import ModuleType

from klfast.compat import verl
from klfast.compat.patching.replacements import replacement
from klfast.compat.patching.sites import KnownCode, Site, flash_attn, known, left_on_gpu, stays

_CORE = "verl.trainer.ppo.core_algos"
_FROM_LOGITS = "verl.utils.torch_functional"
_ROLLOUT = "verl.trainer.ppo.rollout_corr_helper"
_DISTILLATION = "verl.trainer.distillation.fsdp.losses"
_ALL = "0.6 to 0.9, main"
_NO_HELPER = "0.6.0"

_MASKED_SUM = stays(f"{_FROM_LOGITS}:masked_sum", "1f6f1c6daac8a62a", _ALL)
_MASKED_MEAN = stays(f"{_FROM_LOGITS}:masked_mean", "a833f480d14c6d78", _ALL)
_FORWARD = stays(f"{_CORE}:kl_penalty_forward", "21b857ef8d407206", _ALL)

# Up to 0.7 a name with a "+" is an error of kl_penalty_forward.
_KL_CODES = (
    ("54a41f26e292a888", "0.6, 0.7.0"),
    ("26e3aa9865ad925b", "0.7.1"),
    ("3194e8e3a0b07d41", "0.8, 0.9, main"),
)
_KL_STAYS = Site(f"{_CORE}:kl_penalty", tuple(KnownCode(*code) for code in _KL_CODES))


_flash_attn = flash_attn(
    lambda module: module.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE  # verl's spelling
)


def _flash_attn_unless_disabled(module: ModuleType) -> str | None:
    disabled = os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") == "1"
    return None if disabled else _flash_attn(module)


def _compiled(module: ModuleType) -> str:
    return left_on_gpu("runs under torch.compile (verl's use_torch_compile)")


_LOGPROBS = replacement(verl.logprobs_from_logits)

# Up to 0.7.1 weights know no lower bound, and their metrics are of untruncated ones.
_HAS_WEIGHTS = Site(
    f"{_ROLLOUT}:_parse_rollout_is_threshold",
    (KnownCode("bd20388ad5ba265d", "0.8, 0.9, main"),),
    absent="0.6 to 0.7.1",
)
_WEIGHTS = Site(
    f"{_ROLLOUT}:compute_rollout_correction_weights",
    (
        KnownCode("105f532f1cb459dd", "0.6.1"),
        KnownCode("34f80a64e8caf3c0", "0.7"),
        KnownCode(
            "d90fee4a54301489",
            "0.8, 0.9, main",
            replacement(verl.compute_rollout_correction_weights),
        ),
    ),
    absent=_NO_HELPER,
)
_WEIGHT_METRICS = Site(  # two of 0.8's are of truncated weights: klfast's are those of 0.9
    f"{_ROLLOUT}:compute_is_metrics",
    (
        KnownCode("aa5364c9360b5961", "0.6.1, 0.7"),
        KnownCode("f7e377483f68cd9d", "0.8"),
        KnownCode("19e7c8271c839bce", "0.9, main"),
    ),
    absent=_NO_HELPER,
)
_REJECTION = Site(
    f"{_ROLLOUT}:compute_rollout_rejection_mask",
    (
        KnownCode("28320bc2775fb696", "0.6.1, 0.7.0"),  # of one threshold
        KnownCode(
            "55b5f1fb738aa3d8",
            "0.7.1, 0.8, 0.9, main",
            replacement(verl.compute_rollout_rejection_mask),
        ),
    ),
    absent=_NO_HELPER,
)
_REJECTION_METRICS = Site(
    f"{_ROLLOUT}:compute_rs_metrics",
    (
        KnownCode("2b584d4255a770ff", "0.6.1, 0.7.0"),
        KnownCode("e00a87851d2d2e89", "0.7.1, 0.8, 0.9, main"),
    ),
    absent=_NO_HELPER,
)
_THRESHOLDS = Site(  # 0.9 refuses crossed ones, as klfast does
    f"{_ROLLOUT}:_parse_rollout_rs_thresholds",
    (KnownCode("e08a35efca422061", "0.7.1, 0.8"), KnownCode("005720822f18442b", "0.9, main")),
    absent="0.6, 0.7.0",
)
_DRIFT = Site(
    f"{_ROLLOUT}:compute_offpolicy_metrics",
    (
        KnownCode(
            "ff8606b1800b94fe", "0.6.1 to 0.9, main", replacement(verl.compute_offpolicy_metrics)
        ),
    ),
    absent=_NO_HELPER,
)
_ROLLOUT_GROUPS = (
    (
        _DRIFT,
        Site(
            f"{_ROLLOUT}:compute_rollout_corr_metrics_from_logprobs",
            (
                KnownCode(
                    "34755b63718cb82d",
                    "0.6.1 to 0.9, main",
                    replacement(verl.compute_rollout_corr_metrics_from_logprobs),
                ),
            ),
            absent=_NO_HELPER,
        ),
    ),
    (_REJECTION, _REJECTION_METRICS, _THRESHOLDS),
    (
        _WEIGHTS,
        _WEIGHT_METRICS,
        _HAS_WEIGHTS,
        Site(
            f"{_ROLLOUT}:compute_rollout_correction_and_rejection_mask",
            (
                KnownCode("68fa5947c72e8296", "0.6.1, 0.7.0"),
                KnownCode(
                    "d6452bce66806dc6",
                    "0.8, 0.9, main",
                    replacement(verl.compute_rollout_correction_and_rejection_mask),
                ),
            ),
            absent=_NO_HELPER,
        ),
        Site(
            f"{_ROLLOUT}:compute_rollout_correction_and_add_to_batch",
            (
                KnownCode("ae58e11fe64a8290", "0.6.1, 0.7.0"),
                KnownCode(
                    "20f386ac8c2f679f",
                    "0.8, 0.9, main",
                    replacement(verl.compute_rollout_correction_and_add_to_batch),
                ),
            ),
            absent=_NO_HELPER,
        ),
    ),
)

_GROUPS = (
    (
        Site(
            f"{_CORE}:kl_penalty",
            tuple(KnownCode(*code, replacement(verl.kl_penalty)) for code in _KL_CODES),
        ),
        _FORWARD,
    ),
    (
        Site(  # in 0.7.1 and 0.8 "token-sum" is an error
            f"{_CORE}:agg_loss",
            (
                KnownCode("1b62a3545337f118", "0.7.1, 0.8", replacement(verl.agg_loss)),
                KnownCode("46f545d605af0451", "0.9, main", replacement(verl.agg_loss)),
            ),
        ),
        _MASKED_SUM,
    ),
    (
        known(f"{_CORE}:AdaptiveKLController", "20918bb44a36b301", verl.AdaptiveKLController, _ALL),
        known(f"{_CORE}:FixedKLController", "1c206129c972cfb8", verl.FixedKLController, _ALL),
        known(f"{_CORE}:get_kl_controller", "3f3f2ae7494e4993", verl.get_kl_controller, _ALL),
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
                KnownCode("2d738604635c2f2d", "0.6 to 0.8", _LOGPROBS, _flash_attn),
                KnownCode("55052f8356a158da", "0.9, main", _LOGPROBS, _flash_attn_unless_disabled),
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
    *_ROLLOUT_GROUPS,
    (
        Site(
            f"{_DISTILLATION}:compute_forward_kl_topk",
            (
                KnownCode("dffa7d147895e00c", "0.8"),
                KnownCode(
                    "0772a2001c847a69", "0.9, main", replacement(verl.compute_forward_kl_topk)
                ),
            ),
            absent="0.6, 0.7",
        ),
        stays(f"{_DISTILLATION}:kl_divergence", "e92d355bf6eb892c", "0.8, 0.9, main"),
        Site(
            f"{_DISTILLATION}:_chunked_topk_log_probs",
            (KnownCode("5ef04661c8c287ea", "0.9, main"),),
            absent="0.6 to 0.8",
        ),
    ),
)
TARGETS = (_GROUPS,)
