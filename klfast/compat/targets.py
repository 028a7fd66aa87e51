"""The code that ``patch`` replaces, and klfast's in its place: ``TARGETS`` of each framework.

A fingerprint is ``fingerprints.fingerprint`` of code that klfast was proved equal to. The releases
beside it are those whose code was read. ``patch`` goes by the code alone. A row without klfast's
stays as it is: the others of its group call it, and were proved equal with this code of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from klfast.compat import ms_swift, openrlhf, roll, skyrl, trl, trl_losses, trl_trainers, trlx, verl
from klfast.compat.patching.replacements import Blocks, Make, Options, compiled, rewriting
from klfast.compat.patching.sites import INSIDE, Fused, Group, Site, Target, is_there


class _Module(NamedTuple):
    """A module of a framework, or a class in it, and klfast's with functions of the same names."""

    name: str
    ours: Any

    def row(self, name: str, codes: Mapping[str, str], new: Any = None, **rest: Any) -> Site:
        """A function or class by its name; without ``new`` it stays as it is."""
        return Site(f"{self.name}{'.' if ':' in self.name else ':'}{name}", codes, new, **rest)

    def alone(self, name: str, codes: Mapping[str, str], new: Any, **rest: Any) -> Group:
        """A row that is a group by itself."""
        return (self.row(name, codes, new, **rest),)

    def same(self, name: str, codes: Mapping[str, str], fused: Any = None, **rest: Any) -> Site:
        """One that klfast's of the same name takes the place of."""
        return self.row(name, codes, getattr(self.ours, name), fused=fused, **rest)

    def rows(self, releases: str, **codes: str) -> Group:
        """Several that stay and have one code each."""
        return tuple(self.row(name, {code: releases}) for name, code in codes.items())

    def all_same(self, releases: str, **codes: str) -> Group:
        """Several that have one code each, and klfast's in their place."""
        return tuple(self.same(name, {code: releases}) for name, code in codes.items())


def _if(attribute: str, what: str) -> Fused:
    """``what`` the function does on a GPU, if its module's attribute is not None or False."""
    return lambda module: what if getattr(module, attribute) else None


_ZIEGLER = {"AdaptiveKLController": "4599c61cfbfc12a6", "FixedKLController": "a71d6a7c80f4a142"}
_CROSS_ENTROPY = "calls flash-attn's cross entropy"
_TRITON = "calls TRL's Triton kernel"


# trlx: git tags


_MAKE_EXPERIENCE = {  # the averages are of what the second statement makes
    "log_ratio = (logprobs - ref_logprobs) * attention_mask[:, :-1]": (
        "log_ratio = klfast.log_ratio(logprobs, ref_logprobs, attention_mask)"
    ),
    "kl = log_ratio.exp() - 1 - log_ratio": (
        "kl = klfast.mean_kl(logprobs, ref_logprobs, attention_mask)"
    ),
    "mean_kl_per_token = kl.mean()": "mean_kl_per_token = kl.mean_kl_per_token",
    "mean_kl = kl.sum(1).mean()": "mean_kl = kl.mean_kl",
}
_TRLX = (
    _Module("trlx.models.modeling_ppo", trlx).all_same(
        "v0.6.0, v0.7.0, main",
        AdaptiveKLController="69113a2064d3257d",
        FixedKLController="a71d6a7c80f4a142",
    ),
    _Module("trlx.trainer.accelerate_ppo_trainer:AcceleratePPOTrainer", None).alone(
        "make_experience", {INSIDE: "v0.7.0, main"}, rewriting(_MAKE_EXPERIENCE, trlx)
    ),
)


# TRL


_RLOO_KL = {
    "per_token_kl = old_per_token_logps - ref_per_token_logps": (
        "per_token_kl = klfast.per_token_k1("
        "old_per_token_logps, ref_per_token_logps, completion_mask)"
    ),
    "kl = (per_token_kl * completion_mask).sum(-1)": (
        "kl = klfast.sequence_kl(old_per_token_logps, ref_per_token_logps, completion_mask)"
    ),
}
_IF_SAMPLED = "if self.use_vllm and self.vllm_importance_sampling_correction:"
_SAMPLING: Blocks = {  # the ratio and its metrics, of TRL 1.10, and of 1.11 to 1.16
    ("f505af25a426686a", "4d28fa6daab326f1"): (
        f"{_IF_SAMPLED}\n"
        "    vllm_importance_sampling_ratio, sampling_metrics = klfast.ratio_of("
        "self, old_per_token_logps, sampling_per_token_logps, completion_mask, tool_mask)"
    ),
    ("0d0e997930a1fee1", "465a565ba128e268"): (
        f"{_IF_SAMPLED}\n    klfast.log_metrics(self, mode, sampling_metrics)"
    ),
}


def _from_logits(name: str, of_114: str, of_116: str, **rest: Any) -> Group:
    """A function over logits: two ways to ask for its kernel."""
    return (
        _TRL_UTILS.same(
            name, {of_114: "1.14, 1.15"}, _if("_fused_logprob_entropy", _TRITON), **rest
        ),
        _TRL_UTILS.same(
            name,
            {of_116: "1.16"},
            lambda module: _TRITON if module.is_triton_available() else None,
            **rest,
        ),
    )


def _self_distillation(package: str) -> tuple[Group, ...]:
    """The code that SDFT and SDPO each have as an identical copy."""
    module, since = _Module(f"trl.experimental.{package}.loss_utils", trl), "1.6 to 1.16"
    divergence = {"compute_divergence": "059a2e6ab8bab901"}
    full = {"compute_full_logit_self_distillation_loss": "3503e963663745ec"}
    topk = {"compute_topk_self_distillation_loss": "867f4e2e128db47b"}
    bucket = {"add_tail_bucket": "cf554395f47d3c17"}
    return (
        module.all_same(since, **divergence, **full),
        module.all_same(since, **bucket),
        (*module.all_same(since, **topk), *module.rows(since, **divergence, **bucket)),
    )


def _tail_bucket(module: str, releases: str, absent: str) -> Group:
    new = trl.add_tail_bucket_and_mask
    return (Site(f"{module}:_add_tail_bucket", {_BUCKET: releases}, new, absent=absent),)


_TRL_UTILS = _Module("trl.trainer.utils", trl)
_GRPO = _Module("trl.trainer.grpo_trainer:GRPOTrainer", None)
_RLOO = _Module("trl.trainer.rloo_trainer:RLOOTrainer", None)
_GKD = _Module("trl.experimental.gkd.gkd_trainer:GKDTrainer", trl)
_DISTILLATION_TRAINER = "trl.experimental.{0}_distillation.{0}_distillation_trainer".format
_IW_OPD = _Module("trl.experimental.iw_opd.iw_opd_trainer", None)
_BUCKET = "bd9a20c482b576dc"
_UNTIL_113, _SINCE_19 = "1.10 to 1.13", "1.9 to 1.16"
_AS_UNTIL_18 = "as TRL until 1.8"
_TRL = (
    _GRPO.alone(
        "_compute_loss",
        {trl_trainers.COMPUTE_LOSS: trl_trainers.RELEASES},
        Make(trl_trainers.with_fused_kl),
    ),
    _GRPO.alone(
        "_generate_and_score_completions",
        {INSIDE: trl_trainers.RELEASES},
        rewriting({}, trl_trainers, blocks=_SAMPLING),
    ),
    _RLOO.alone(
        "_generate_and_score_completions",
        {INSIDE: "0.22 to 1.16"},
        rewriting(_RLOO_KL, trl_losses),
    ),
    (
        *_TRL_UTILS.all_same(_UNTIL_113, selective_log_softmax="f6a28cfc3de7a663"),
        *_from_logits("selective_log_softmax", "36b19856545f3678", "5108000636856a85"),
    ),
    (
        *_TRL_UTILS.all_same(_UNTIL_113, entropy_from_logits="c835cc3db16586be"),
        *_from_logits("entropy_from_logits", "40cd8bc08dcf4ff9", "a12b11326fe0f653"),
    ),
    _from_logits(
        "selective_log_softmax_and_entropy",
        "bbc5e71b87ab2182",
        "0194eb27f740d629",
        absent="as TRL until 1.13",
    ),
    _GKD.all_same("1.7 to 1.16", generalized_jsd_loss="208d0b50cb51ec1e"),
    *_self_distillation("sdft"),
    *_self_distillation("sdpo"),
    _tail_bucket(_IW_OPD.name, _SINCE_19, _AS_UNTIL_18),
    _tail_bucket(_DISTILLATION_TRAINER("server"), _SINCE_19, _AS_UNTIL_18),
    _tail_bucket(_DISTILLATION_TRAINER("async"), "1.11 to 1.16", "as TRL until 1.10"),
    (
        Site(
            f"{_IW_OPD.name}:IWOPDTrainer.generalized_jsd_loss",
            {"2ed5176b663a01cf": _SINCE_19},
            trl.iw_opd_generalized_jsd_loss,
            absent=_AS_UNTIL_18,
        ),
        *_IW_OPD.rows(_SINCE_19, _add_tail_bucket=_BUCKET, _jsd_divergence="b06f2291a0d60cc1"),
        _IW_OPD.row("IWOPDTrainer._reduce_divergence_loss", {"2b209e065a54962c": _SINCE_19}),
    ),
)
_TRL_PPO = (
    _Module("trl.trainer.ppo_trainer:PPOTrainer", None).alone(
        "_kl_penalty", {"e8aa6467725bf91c": "0.6 to 0.11"}, trl_trainers.kl_penalty_of_ppo
    ),
    _TRL_UTILS.all_same("0.6 to 0.11", **_ZIEGLER),
)


# verl


def _flash_attn_unless_disabled(module: ModuleType) -> str | None:
    disabled = os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") == "1"
    return None if disabled else _flash_attn(module)


_flash_attn = _if("FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", _CROSS_ENTROPY)  # verl's spelling


_CORE = _Module("verl.trainer.ppo.core_algos", verl)
_RAY_TRAINER = _Module("verl.trainer.ppo.ray_trainer", verl)
_VERL_TORCH = _Module("verl.utils.torch_functional", verl)
_ROLLOUT = _Module("verl.trainer.ppo.rollout_corr_helper", verl)
_FSDP = _Module("verl.trainer.distillation.fsdp.losses", verl)
_COMPILED = lambda module: "runs under torch.compile (verl's use_torch_compile)"  # noqa: E731
_VERLS, _SINCE_08, _SINCE_061 = "0.6 to 0.9, main", "0.8, 0.9, main", "0.6.1 to 0.9, main"
_KL_PENALTY = {  # up to 0.7 a name with a "+" is an error of kl_penalty_forward
    "54a41f26e292a888": "0.6, 0.7.0",
    "26e3aa9865ad925b": "0.7.1",
    "3194e8e3a0b07d41": _SINCE_08,
}
_AGG_LOSS = {  # in 0.7.1 and 0.8 "token-sum" is an error
    "1b62a3545337f118": "0.7.1, 0.8",
    "46f545d605af0451": "0.9, main",
}
_IS_METRICS = {  # two of 0.8's use truncated weights; klfast follows 0.9
    "aa5364c9360b5961": "0.6.1, 0.7",
    "f7e377483f68cd9d": "0.8",
    "19e7c8271c839bce": "0.9, main",
}
_RS_METRICS = {"2b584d4255a770ff": "0.6.1, 0.7.0", "e00a87851d2d2e89": "0.7.1, 0.8, 0.9, main"}
_RS_THRESHOLDS = {"e08a35efca422061": "0.7.1, 0.8", "005720822f18442b": "0.9, main"}
_FORWARD = _CORE.row("kl_penalty_forward", {"21b857ef8d407206": _VERLS})
_MASKED_SUM = _VERL_TORCH.row("masked_sum", {"1f6f1c6daac8a62a": _VERLS})
_MASKED_MEAN = _VERL_TORCH.row("masked_mean", {"a833f480d14c6d78": _VERLS})


def _rollout(name: str, codes: dict[str, str], *, other: dict[str, str] | None = None) -> Group:
    """A function of the rollout correction; klfast's is not equal to the other codes."""
    others = () if other is None else (_ROLLOUT.row(name, other, absent="0.6.0"),)
    return (*others, _ROLLOUT.same(name, codes, absent="0.6.0"))


_VERL = (
    (_CORE.same("kl_penalty", _KL_PENALTY), _FORWARD),
    (_CORE.same("agg_loss", _AGG_LOSS), _MASKED_SUM),
    _CORE.all_same(
        _VERLS,
        AdaptiveKLController="20918bb44a36b301",
        FixedKLController="1c206129c972cfb8",
        get_kl_controller="3f3f2ae7494e4993",
    ),
    (
        *_RAY_TRAINER.all_same(_VERLS, apply_kl_penalty="9992a9a9c23c6957"),
        _CORE.row("kl_penalty", _KL_PENALTY),
        _FORWARD,
        _MASKED_MEAN,
        _MASKED_SUM,
    ),
    (
        _VERL_TORCH.same("logprobs_from_logits", {"2d738604635c2f2d": "0.6 to 0.8"}, _flash_attn),
        _VERL_TORCH.same(
            "logprobs_from_logits", {"55052f8356a158da": "0.9, main"}, _flash_attn_unless_disabled
        ),
        _VERL_TORCH.row("logprobs_from_logits_v2", {"eb68b39926973cb1": _VERLS}),
    ),
    (_VERL_TORCH.same("entropy_from_logits", {"a81547a47a26577e": _VERLS}, _COMPILED),),
    _VERL_TORCH.all_same(_VERLS, entropy_from_logits_with_chunking="8238e2ad26ad701e"),
    (
        *_rollout("compute_offpolicy_metrics", {"ff8606b1800b94fe": _SINCE_061}),
        *_rollout("compute_rollout_corr_metrics_from_logprobs", {"34755b63718cb82d": _SINCE_061}),
    ),
    (
        *_rollout(
            "compute_rollout_rejection_mask",
            {"55b5f1fb738aa3d8": "0.7.1, 0.8, 0.9, main"},
            other={"28320bc2775fb696": "0.6.1, 0.7.0"},  # of one threshold
        ),
        _ROLLOUT.row("compute_rs_metrics", _RS_METRICS, absent="0.6.0"),
        # 0.9 refuses crossed ones, as klfast does
        _ROLLOUT.row("_parse_rollout_rs_thresholds", _RS_THRESHOLDS, absent="0.6, 0.7.0"),
    ),
    (
        *_rollout(
            "compute_rollout_correction_weights",
            {"d90fee4a54301489": _SINCE_08},
            other={"105f532f1cb459dd": "0.6.1", "34f80a64e8caf3c0": "0.7"},
        ),
        _ROLLOUT.row("compute_is_metrics", _IS_METRICS, absent="0.6.0"),
        # up to 0.7.1 weights know no lower bound, and metrics are of untruncated ones
        _ROLLOUT.row(
            "_parse_rollout_is_threshold", {"bd20388ad5ba265d": _SINCE_08}, absent="0.6 to 0.7.1"
        ),
        *_rollout(
            "compute_rollout_correction_and_rejection_mask",
            {"d6452bce66806dc6": _SINCE_08},
            other={"68fa5947c72e8296": "0.6.1, 0.7.0"},
        ),
        *_rollout(
            "compute_rollout_correction_and_add_to_batch",
            {"20f386ac8c2f679f": _SINCE_08},
            other={"ae58e11fe64a8290": "0.6.1, 0.7.0"},
        ),
    ),
    (
        _FSDP.row("compute_forward_kl_topk", {"dffa7d147895e00c": "0.8"}, absent="0.6, 0.7"),
        _FSDP.same("compute_forward_kl_topk", {"0772a2001c847a69": "0.9, main"}, absent="0.6, 0.7"),
        _FSDP.row("kl_divergence", {"e92d355bf6eb892c": _SINCE_08}),
        _FSDP.row(
            "_chunked_topk_log_probs", {"5ef04661c8c287ea": "0.9, main"}, absent="0.6 to 0.8"
        ),
    ),
)


# OpenRLHF


_UTILS = _Module("openrlhf.models.utils", openrlhf)
_OPENRLHFS = "0.10 to 0.11.2, main"
_OPENRLHF = (
    (
        _UTILS.row(
            "compute_approx_kl",
            {"b30f7454ec143071": "0.10, 0.11.0, main"},
            openrlhf.compute_approx_kl_unweighted,
        ),
        _UTILS.same(
            "compute_approx_kl", {"7fb45510c34dfeb7": "0.11.1", "9a31bec1e32b8ff1": "0.11.2"}
        ),
    ),
    _UTILS.all_same(_OPENRLHFS, compute_reward="ed3b03fa22353a97"),
    (
        _UTILS.same(
            "log_probs_from_logits",
            {"66bc5702680a2331": _OPENRLHFS},
            lambda module: _CROSS_ENTROPY if is_there("flash_attn") else None,
        ),
        _UTILS.row("_logsumexp_by_chunk", {"ae51220665162669": _OPENRLHFS}),
    ),
    _UTILS.alone(
        "compute_entropy",
        {INSIDE: _OPENRLHFS},
        compiled(openrlhf.compute_entropy, "c3423c739cc25222"),
        fused=lambda module: "runs under torch.compile",
    ),
    _Module("openrlhf.trainer.ppo_utils.kl_controller", openrlhf).all_same(_OPENRLHFS, **_ZIEGLER),
)


# ROLL: git tags


_FUNCTIONALS = _Module("roll.utils.functionals", roll)
_DIVERGENCES = _Module(
    "roll.pipeline.distill.various_divergence:VariousDivergence", roll.VariousDivergence
)
_ROLLS, _SINCE_013 = "v0.1.0 to v0.3.0, main", "v0.1.3 to v0.3.0, main"
_ROLL = (
    _FUNCTIONALS.all_same(_ROLLS, compute_approx_kl="503c0539649c821e"),
    _FUNCTIONALS.all_same(_ROLLS, log_probs_from_logits="b35fbb39a2cd0c30"),
    _FUNCTIONALS.all_same(_ROLLS, entropy_from_logits="139adf4da48b76ee"),
    _Module("roll.utils.kl_controller", roll).all_same(
        _ROLLS, **_ZIEGLER, get_kl_controller="d4f14e44554b1dcf"
    ),
    # Each by itself, so that objectives that klfast does not compute stay as they are.
    _DIVERGENCES.all_same(_SINCE_013, compute_forward_kl_divergence="e666096a7693be98"),
    _DIVERGENCES.all_same(_SINCE_013, compute_reverse_kl_divergence="c2647239834d01cd"),
    _DIVERGENCES.all_same(_SINCE_013, compute_js_divergence="5ce774e327e9d6a8"),
)


# SkyRL


_PPO_UTILS = _Module("skyrl.backends.skyrl_train.utils.ppo_utils", skyrl)
_SKYRL_TORCH = _Module("skyrl.backends.skyrl_train.utils.torch_utils", skyrl)
_SKYRLS = "0.1 to 0.3, main"
# In 0.1 it has no gradient, under a decorator: that one is left alone.
_APPROX_KL = {"c3230d7b0456050e": "0.2", "1ad5bff2dde325ff": "0.3, main"}
_SKYRL = (
    (_PPO_UTILS.same("compute_approx_kl", _APPROX_KL),),
    _PPO_UTILS.all_same(_SKYRLS, **_ZIEGLER, get_kl_controller="58fcc7e7adac9233"),
    (
        _Module("skyrl.train.trainer:RayPPOTrainer", skyrl).same(
            "apply_reward_kl_penalty",
            {"db9cb4e3ee26b812": "0.2, 0.3", "07965a90601894bd": "main"},
        ),
        _PPO_UTILS.row("compute_approx_kl", _APPROX_KL),
        _SKYRL_TORCH.row("masked_mean", {"41d4c44f9a8a85f8": _SKYRLS}),
    ),
    (
        _SKYRL_TORCH.same(
            "logprobs_from_logits",
            {"d2bd2e7d0b976a6a": _SKYRLS},
            _if("FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", _CROSS_ENTROPY),
        ),
        *_SKYRL_TORCH.rows(
            _SKYRLS,
            logprobs_from_logits_v2="870d349960e72b17",
            logprobs_from_logits_flash_attn="eea9cff2f93bb845",
        ),
    ),
    (
        _SKYRL_TORCH.same(
            "chunked_entropy_from_logits",
            {"a4cf7868d2d45825": "0.1, 0.2", "d5213f3f61bd6ab4": "0.3, main"},
        ),
    ),
)


# ms-swift: the KL that GRPO writes inline, in its trainer on transformers and in that on Megatron.
# Until 4.3 the sums of ``kl_in_reward`` and the distillation loss have other code, which is left.


_IN_LOSS = {
    "safe_ratio = torch.clamp(ref_per_token_logps - per_token_logps, min=-20, max=20)": (
        "safe_ratio = None"
    ),
    "per_token_kl = torch.clamp(torch.exp(safe_ratio) - safe_ratio - 1, min=-10, max=10)": (
        "per_token_kl = klfast.per_token_kl(per_token_logps, ref_per_token_logps)"
    ),
}


def _in_reward(kl: str) -> dict[str, str]:
    """The statements of ``kl_in_reward``, whose sum has one name or another."""
    return {
        "per_token_kl = grpo_batch.old_per_token_logps - grpo_batch.ref_per_token_logps": (
            "per_token_kl = None"
        ),
        f"{kl} = (per_token_kl * grpo_batch.completion_mask).sum(-1)": (
            f"{kl} = klfast.sequence_kl(grpo_batch.old_per_token_logps, "
            "grpo_batch.ref_per_token_logps, grpo_batch.completion_mask)"
        ),
    }


# Not ``gkd_loss`` itself: Megatron's trainer calls it with vocabularies in shards.
_GKD_CALL = "gkd_loss(student_logits, teacher_output, shifted_labels, self.beta, self.temperature)"
_GKD_SUM = {f"total, num_valid = {_GKD_CALL}": f"total, num_valid = klfast.{_GKD_CALL}"}


def _rewritten(where: str, statements: dict[str, str], releases: str) -> Group:
    """A method that ms-swift times: its source has the decorator, and is rewritten whole."""
    rewrite = rewriting(statements, ms_swift).make

    def make(old: Any, options: Options) -> Any:
        timed = getattr(old, "__globals__", {}).get("__name__") == "swift.rlhf_trainers.utils"
        return rewrite(getattr(old, "__wrapped__", old) if timed else old, options)

    absent = "as without Megatron" if where.startswith(_MEGATRON) else None
    return (Site(where, {INSIDE: releases}, Make(make), absent=absent),)


_TRAINER = "swift.rlhf_trainers.grpo_trainer:GRPOTrainer"
_MEGATRON = "swift.megatron.trainers.grpo_trainer:MegatronGRPOTrainer"
_GKD_TRAINER = "swift.rlhf_trainers.gkd_trainer:GKDTrainer"
_GKD_LOSS = _Module("swift.rlhf_trainers.gkd_loss", None)
_SWIFTS, _SINCE_44 = "4.3 to 4.6, main", "4.4 to 4.6, main"
_MS_SWIFT = (
    _rewritten(f"{_TRAINER}._compute_loss_and_metrics", _IN_LOSS, _SWIFTS),
    _rewritten(f"{_TRAINER}._compute_advantages", _in_reward("kl"), _SINCE_44),
    _rewritten(f"{_MEGATRON}.loss_func", _IN_LOSS, _SWIFTS),
    _rewritten(f"{_MEGATRON}._compute_kl_from_batches", _in_reward("sample_kl"), _SINCE_44),
    (
        *_rewritten(f"{_GKD_TRAINER}._compute_jsd_loss", _GKD_SUM, _SINCE_44),
        *_GKD_LOSS.rows(
            _SINCE_44,
            gkd_loss="a17cd23003291afa",
            extract_active="ec323bd4396e427d",  # 4.3 takes the teacher's labels from elsewhere
            _align_vocab="c115e449072a5c79",
            default_kl_div="acedac886face6ba",
            default_gather="8af74a475fa426b2",
            default_log_softmax="8e37b1597457e037",
        ),
        _GKD_LOSS.row("TeacherOutput.select", {"25acdfcc61909a89": _SINCE_44}),
        _GKD_LOSS.row(  # since 4.6 the loss of no tokens has a gradient of 0, as klfast's has
            "jsd_loss", {"f37af55da6c0da61": "4.4, 4.5, main", "c87210fc29b0826e": "4.6"}
        ),
    ),
    _Module("swift.rlhf_trainers.utils", ms_swift).all_same(
        _SWIFTS, entropy_from_logits="c140de4fb9cb830a"
    ),
)


TARGETS: dict[str, tuple[Target, ...]] = {
    "trlx": (_TRLX,),
    "trl": (_TRL, _TRL_PPO),
    "verl": (_VERL,),
    "openrlhf": (_OPENRLHF,),
    "roll": (_ROLL,),
    "skyrl": (_SKYRL,),
    "ms_swift": (_MS_SWIFT,),
}
"""A target for each era of a framework; the first of which something is known counts."""
