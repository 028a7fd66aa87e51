"""ms-swift, 4.3 to 4.6 and its main branch of August 2026: the KL that GRPO writes inline.

Twice, as its trainers do: the one on transformers, and the one on Megatron.
"""

from __future__ import annotations

from typing import Any

from klfast.compat import ms_swift
from klfast.compat.replacements import Make, rewriting
from klfast.compat.sites import Form, Site, Target, known

_ALL = "4.3 to 4.6, main"
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
    ),
}


def _under_its_decorator(make: Make) -> Make:
    """For a method that ms-swift times: its source has the decorator, and is rewritten whole."""

    def make_inside(old: Any, exact: bool) -> Any:
        timed = getattr(old, "__globals__", {}).get("__name__") == "swift.rlhf_trainers.utils"
        return make(getattr(old, "__wrapped__", old) if timed else old, exact)

    return make_inside


def _rewritten(where: str, statements: dict[str, str]) -> tuple[Site]:
    make = _under_its_decorator(rewriting(statements, ms_swift))
    return (Site(where, (Form(None, _ALL, make),)),)


TARGETS = (
    Target(
        ("swift",),
        _ALL,
        (
            _rewritten(f"{_TRAINER}._compute_loss_and_metrics", _IN_LOSS),
            _rewritten(f"{_TRAINER}._compute_advantages", _in_reward("kl")),
            _rewritten(f"{_MEGATRON}.loss_func", _IN_LOSS),
            _rewritten(f"{_MEGATRON}._compute_kl_from_batches", _in_reward("sample_kl")),
            _rewritten(
                "swift.rlhf_trainers.gkd_trainer:GKDTrainer._compute_jsd_loss", _DISTILLATION
            ),
            (
                known(
                    "swift.rlhf_trainers.utils:entropy_from_logits",
                    "c140de4fb9cb830a",
                    ms_swift.entropy_from_logits,
                    _ALL,
                ),
            ),
        ),
        exact=True,
        distribution="ms-swift",
    ),
)
