"""ms-swift, 4.3 to 4.6 and its main branch of August 2026: the KL that GRPO writes inline.

Twice, as its trainers do: the one on transformers, and the one on Megatron. Until 4.3 the sums of
``kl_in_reward`` and the distillation loss have other code, which is left alone.
"""

from __future__ import annotations

from typing import Any

from klfast.compat import ms_swift
from klfast.compat.patching.replacements import Make, rewriting
from klfast.compat.patching.sites import KnownCode, Site, known, stays

_ALL = "4.3 to 4.6, main"
_SINCE_44 = "4.4 to 4.6, main"
_GKD_LOSS = "swift.rlhf_trainers.gkd_loss"
_TRAINER = "swift.rlhf_trainers.grpo_trainer:GRPOTrainer"
_MEGATRON = "swift.megatron.trainers.grpo_trainer:MegatronGRPOTrainer"

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
_DISTILLATION = {
    "total, num_valid = gkd_loss("
    "student_logits, teacher_output, shifted_labels, self.beta, self.temperature)": (
        "total, num_valid = klfast.gkd_loss("
        "student_logits, teacher_output, shifted_labels, self.beta, self.temperature)"
    )
}


def _under_its_decorator(make: Make) -> Make:
    """For a method that ms-swift times: its source has the decorator, and is rewritten whole."""

    def make_inside(old: Any, exact: bool) -> Any:
        timed = getattr(old, "__globals__", {}).get("__name__") == "swift.rlhf_trainers.utils"
        return make(getattr(old, "__wrapped__", old) if timed else old, exact)

    return make_inside


def _rewritten(where: str, statements: dict[str, str], releases: str) -> Site:
    make = _under_its_decorator(rewriting(statements, ms_swift))
    absent = "as without Megatron" if where.startswith(_MEGATRON) else None
    return Site(where, (KnownCode(None, releases, make),), absent)


# ``gkd_loss`` and its callees; ``extract_active`` of 4.3 takes the teacher's labels from elsewhere.
_DISTILLATION_STAYS = (
    *(
        stays(f"{_GKD_LOSS}:{name}", code, _SINCE_44)
        for name, code in (
            ("gkd_loss", "a17cd23003291afa"),
            ("extract_active", "ec323bd4396e427d"),
            ("TeacherOutput.select", "25acdfcc61909a89"),
            ("_align_vocab", "c115e449072a5c79"),
            ("default_kl_div", "acedac886face6ba"),
            ("default_gather", "8af74a475fa426b2"),
            ("default_log_softmax", "8e37b1597457e037"),
        )
    ),
    Site(  # since 4.6 the loss of no tokens has a gradient of 0, as klfast's has
        f"{_GKD_LOSS}:jsd_loss",
        (KnownCode("f37af55da6c0da61", "4.4, 4.5, main"), KnownCode("c87210fc29b0826e", "4.6")),
    ),
)

_GROUPS = (
    (_rewritten(f"{_TRAINER}._compute_loss_and_metrics", _IN_LOSS, _ALL),),
    (_rewritten(f"{_TRAINER}._compute_advantages", _in_reward("kl"), _SINCE_44),),
    (_rewritten(f"{_MEGATRON}.loss_func", _IN_LOSS, _ALL),),
    (_rewritten(f"{_MEGATRON}._compute_kl_from_batches", _in_reward("sample_kl"), _SINCE_44),),
    (
        _rewritten(
            "swift.rlhf_trainers.gkd_trainer:GKDTrainer._compute_jsd_loss", _DISTILLATION, _SINCE_44
        ),
        *_DISTILLATION_STAYS,
    ),
    (
        known(
            "swift.rlhf_trainers.utils:entropy_from_logits",
            "c140de4fb9cb830a",
            ms_swift.entropy_from_logits,
            _ALL,
        ),
    ),
)
TARGETS = (_GROUPS,)
