"""TRL: GRPO, RLOO, the functions over logits and the distillation of 1.x, and the PPO of 0.x."""

from __future__ import annotations

from types import ModuleType

import torch

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


_LOGPROB, _DIVERGENCE = "trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence"


def _tiles(module: str, **codes: str) -> Group:
    """What the functions over hidden states do on a CPU; those of 1.15 run on GPUs alone."""
    return tuple(
        Site(f"{module}:{name}", (KnownCode(code, "1.16"),), absent="as TRL until 1.15")
        for name, code in codes.items()
    )


def _from_hidden(where: str, new: object, of_115: str, of_116: str) -> Site:
    return Site(
        where,
        (KnownCode(of_115, "1.15"), KnownCode(of_116, "1.16", replacement(new), _tiles_triton)),
        absent="as TRL until 1.14",
    )


def _tiles_triton(module: ModuleType) -> str | None:
    return _TRITON if module._use_triton(torch.device("cuda")) else None


_OF_TILES = _tiles(_LOGPROB, _torch_transform="8e9e15b58c098d1f", _addmm_fp32="e19c9c70544733e9")

_FROM_HIDDEN: tuple[Group, ...] = (
    (
        _from_hidden(
            f"{_LOGPROB}:ChunkedLogProbFunction",
            trl.ChunkedLogProbFunction,
            "0fe28513f2ced808",
            "1f3581d27a8a294d",
        ),
        *_tiles(_LOGPROB, _forward_tile="9a9663c0e9cff26d", _backward_tile="a61843061173f2f4"),
        *_OF_TILES,
    ),
    (
        _from_hidden(
            f"{_DIVERGENCE}:ChunkedDivergenceFunction",
            trl.ChunkedDivergenceFunction,
            "c04ec865c5f82a8b",
            "1283ab7539209b16",
        ),
        *_tiles(
            _DIVERGENCE,
            _stats_tile="c78ba0ebdf52c124",
            _jsd_tile="4337b00614a592d0",
            _backward_tile="29d596355a47399a",
            _project="34323215601cea43",
            _compute_dtype="3232384b176bdee8",
        ),
        *_OF_TILES,
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
    *_FROM_HIDDEN,
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
