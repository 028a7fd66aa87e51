"""Megatron-LM: the loss over a teacher's stored log-probs, and the KL inside of its GRPO loss.

``topk_kl_div`` of ``megatron.training.distillation.cached_logits_loss`` and ``kl_term`` of
``megatron.rl.rl_utils.calculate_grpo_loss``, of core_v0.19.0 and its main branch of August 2026.
Use ``from klfast.compat.megatron_lm import topk_kl_div`` in place of Megatron's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klfast.compat.common import per_token
from klfast.compat.divergences import check_k_words
from klfast.compat.presets import MEGATRON_LM
from klfast.logits.api import topk_kl_divergence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SENTINEL", "kl_term", "topk_kl_div"]

SENTINEL = -1e3
"""The log-prob by which Megatron stores that an entry does not exist."""


def topk_kl_div(
    student_logits: Tensor,
    teacher_topk_logprobs: Tensor,
    teacher_topk_indices: Tensor,
    tp_size: int = 1,
    tp_rank: int = 0,
    tp_group: ProcessGroup | None = None,
    add_ghost_token: bool = False,
) -> Tensor:
    """The KL from a teacher's K stored words of every token, [T, B, V] -> [B, T], in nats.

    ``sum over the K words of q log(q / p)``, with p = softmax(student_logits) and q the teacher's
    probabilities; with ``add_ghost_token`` also of one more category, all other words together,
    1 - sum of q and 1 - sum of p: ``klfast.topk_kl_divergence`` with the tail ``"drop"``, which may
    be negative, or ``"bucket"``.

    Args:
        student_logits: [T, B, V].
        teacher_topk_logprobs: [T, B, K]; -1000 where an entry does not exist. Gradients reach them
            if they require it.
        teacher_topk_indices: [T, B, K]. Those of entries that do not exist are not read.
        tp_size: 1: klfast does not add up shards of a vocabulary here.
        tp_rank: of no use then, like the next.
        tp_group: see there.
        add_ghost_token: see above. ``CachedLogitsKDLoss`` asks for it.

    Differs from Megatron: the logits stay as they are (theirs subtracts the greatest from fp32
    logits in place); a ghost token has at least 2^-24, and its gradient down to there (theirs is
    1e-8 without a gradient where fp32 has no digit left of 1 - sum, below 6e-8); of a token without
    any entry the result is 0, with a ghost token too; fp64 stays fp64; an index outside of the
    vocabulary of an entry that exists is an error, where theirs leaves the entry out.

    Raises:
        ValueError: a wrong shape or value, a word twice, or ``tp_size`` > 1.
    """
    if tp_size != 1:
        raise ValueError(
            f"tp_size must be 1, as klfast adds up no shards of a vocabulary here, got {tp_size!r}"
        )
    check_k_words(
        "student_logits",
        student_logits,
        teacher_topk_logprobs=teacher_topk_logprobs,
        teacher_topk_indices=teacher_topk_indices,
    )
    exist = teacher_topk_logprobs.detach() != SENTINEL
    value = topk_kl_divergence(
        student_logits,
        teacher_topk_indices,
        teacher_topk_logprobs.masked_fill(~exist, -torch.inf),
        tail="bucket" if add_ghost_token else "drop",
    )
    return value.transpose(0, 1).contiguous()


def kl_term(current_logprobs: Tensor, ref_logprobs: Tensor, *, exact: bool = False) -> Tensor:
    """The KL of every token in Megatron's GRPO loss, in nats, of the shape of the log-probs: k3.

    ``exp(-x) - 1 + x`` of x = ``current_logprobs - ref_logprobs``, without a limit and without a
    mask; its loss has it ``kl_beta`` times.

    Differs from Megatron: low-precision inputs give fp32 (``exact=True``: their own dtype), and it
    keeps its digits near 0.
    """
    return per_token(current_logprobs, ref_logprobs, MEGATRON_LM["k3"], exact=exact)
