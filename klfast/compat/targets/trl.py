"""TRL: GRPO, RLOO, the functions over logits and the distillation of 1.x, and the PPO of 0.x."""

from __future__ import annotations

from types import ModuleType

from klfast.compat import trl, trl_sampling_trainers, trl_trainers
from klfast.compat.patching.replacements import (
    Blocks,
    replacement,
    rewriting,
)
from klfast.compat.patching.sites import Group, KnownCode, Site, known, left_on_gpu, stays

_UTILS = "trl.trainer.utils"

_RLOO = {
    "per_token_kl = old_per_token_logps - ref_per_token_logps": (
        "per_token_kl = klfast.per_token_k1("
        "old_per_token_logps, ref_per_token_logps, completion_mask)"
    ),
    "kl = (per_token_kl * completion_mask).sum(-1)": (
        "kl = klfast.sequence_kl(old_per_token_logps, ref_per_token_logps, completion_mask)"
    ),
}

_IF_SAMPLED = "if self.use_vllm and self.vllm_importance_sampling_correction:"

_SAMPLING: Blocks = {
    ("f505af25a426686a", "4d28fa6daab326f1"): (
        f"{_IF_SAMPLED}\n"
        "    vllm_importance_sampling_ratio, sampling_metrics = klfast.ratio_of("
        "self, old_per_token_logps, sampling_per_token_logps, completion_mask, tool_mask)"
    ),
    ("0d0e997930a1fee1", "465a565ba128e268"): (
        f"{_IF_SAMPLED}\n    klfast.log_metrics(self, mode, sampling_metrics)"
    ),
}
"""The ratio and its metrics, of TRL 1.10, and of 1.11 to 1.16."""


_TRITON = left_on_gpu("calls TRL's Triton kernel")


def _triton_of_114(module: ModuleType) -> str | None:
    return _TRITON if module._fused_logprob_entropy is not None else None


def _triton(module: ModuleType) -> str | None:
    return _TRITON if module.is_triton_available() else None


def _from_logits(
    new: object, until_113: str | None, of_114: str, of_116: str
) -> tuple[KnownCode, ...]:
    """The codes of a function over logits: without a kernel, and two ways to ask for it."""
    make = replacement(new)
    codes = (
        KnownCode(of_114, "1.14, 1.15", make, _triton_of_114),
        KnownCode(of_116, "1.16", make, _triton),
    )
    return codes if until_113 is None else (KnownCode(until_113, "1.10 to 1.13", make), *codes)


def _self_distillation(module: str) -> tuple[Group, ...]:
    """The code that SDFT and SDPO each have, in the same words."""
    since = "1.6 to 1.16"
    divergence = (f"{module}:compute_divergence", "059a2e6ab8bab901")
    bucket = (f"{module}:add_tail_bucket", "cf554395f47d3c17")
    return (
        (
            known(*divergence, trl.compute_divergence, since),
            known(
                f"{module}:compute_full_logit_self_distillation_loss",
                "3503e963663745ec",
                trl.compute_full_logit_self_distillation_loss,
                since,
            ),
        ),
        (known(*bucket, trl.add_tail_bucket, since),),
        (
            known(
                f"{module}:compute_topk_self_distillation_loss",
                "867f4e2e128db47b",
                trl.compute_topk_self_distillation_loss,
                since,
            ),
            stays(*divergence, since),
            stays(*bucket, since),
        ),
    )


_BUCKET = "bd9a20c482b576dc"
_IW_OPD = "trl.experimental.iw_opd.iw_opd_trainer"
_SINCE_19 = "1.9 to 1.16"


def _bucket(module: str, releases: str, absent: str) -> Group:
    make = replacement(trl.add_tail_bucket_and_mask)
    return (Site(f"{module}:_add_tail_bucket", (KnownCode(_BUCKET, releases, make),), absent),)


_FEW_WORDS: tuple[Group, ...] = (
    _bucket(_IW_OPD, _SINCE_19, "as TRL until 1.8"),
    _bucket(
        "trl.experimental.server_distillation.server_distillation_trainer",
        _SINCE_19,
        "as TRL until 1.8",
    ),
    _bucket(
        "trl.experimental.async_distillation.async_distillation_trainer",
        "1.11 to 1.16",
        "as TRL until 1.10",
    ),
    (
        Site(
            f"{_IW_OPD}:IWOPDTrainer.generalized_jsd_loss",
            (
                KnownCode(
                    "2ed5176b663a01cf", _SINCE_19, replacement(trl.iw_opd_generalized_jsd_loss)
                ),
            ),
            absent="as TRL until 1.8",
        ),
        stays(f"{_IW_OPD}:_add_tail_bucket", _BUCKET, _SINCE_19),
        stays(f"{_IW_OPD}:_jsd_divergence", "b06f2291a0d60cc1", _SINCE_19),
        stays(f"{_IW_OPD}:IWOPDTrainer._reduce_divergence_loss", "2b209e065a54962c", _SINCE_19),
    ),
)


_TRAINERS = (
    (
        Site(
            "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
            (
                KnownCode(
                    trl_trainers.COMPUTE_LOSS, trl_trainers.RELEASES, trl_trainers.with_fused_kl
                ),
            ),
        ),
    ),
    (
        Site(
            "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
            (
                KnownCode(
                    None,
                    trl_trainers.RELEASES,
                    rewriting({}, trl_sampling_trainers.GRPO, blocks=_SAMPLING),
                ),
            ),
        ),
    ),
    (
        Site(
            "trl.trainer.rloo_trainer:RLOOTrainer._generate_and_score_completions",
            (KnownCode(None, "0.22 to 1.16", rewriting(_RLOO, trl_trainers.RLOO)),),
        ),
    ),
    (
        Site(
            f"{_UTILS}:selective_log_softmax",
            _from_logits(
                trl.selective_log_softmax,
                "f6a28cfc3de7a663",
                "36b19856545f3678",
                "5108000636856a85",
            ),
        ),
    ),
    (
        Site(
            f"{_UTILS}:entropy_from_logits",
            _from_logits(
                trl.entropy_from_logits, "c835cc3db16586be", "40cd8bc08dcf4ff9", "a12b11326fe0f653"
            ),
        ),
    ),
    (
        Site(
            f"{_UTILS}:selective_log_softmax_and_entropy",
            _from_logits(
                trl.selective_log_softmax_and_entropy, None, "bbc5e71b87ab2182", "0194eb27f740d629"
            ),
            absent="as TRL until 1.13",
        ),
    ),
    (
        known(
            "trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss",
            "208d0b50cb51ec1e",
            trl.generalized_jsd_loss,
            "1.7 to 1.16",
        ),
    ),
    *_self_distillation("trl.experimental.sdft.loss_utils"),
    *_self_distillation("trl.experimental.sdpo.loss_utils"),
    *_FEW_WORDS,
)
"""The releases 1.10 to 1.16."""

_PPO = (
    (
        known(
            "trl.trainer.ppo_trainer:PPOTrainer._kl_penalty",
            "e8aa6467725bf91c",
            trl_trainers.kl_penalty_of_ppo,
            "0.6 to 0.11",
        ),
    ),
    (
        known(
            f"{_UTILS}:AdaptiveKLController",
            "4599c61cfbfc12a6",
            trl.AdaptiveKLController,
            "0.6 to 0.11",
        ),
        known(
            f"{_UTILS}:FixedKLController", "a71d6a7c80f4a142", trl.FixedKLController, "0.6 to 0.11"
        ),
    ),
)
"""The releases 0.6 to 0.11 (PPO)."""

TARGETS = (_TRAINERS, _PPO)
