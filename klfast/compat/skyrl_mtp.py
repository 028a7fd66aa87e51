"""SkyRL's losses of a draft head, ``skyrl.backends.skyrl_train.mtp.soft_ce``, as read in August
2026: the soft cross-entropy between the head (p, the student) and the policy (q, its teacher).

Per token ``-sum over V of q log p = H(q) + KL(q || p)``, in nats, at a temperature of 1. The
student is read once, the teacher twice, for its entropy, and nothing of their size is made but the
student's gradient ``p - q``.

Differs from SkyRL: near p = q the gradient keeps its digits; rows under the mask are not read, NaN
there included; a word that both exclude (-inf) adds 0, where theirs is NaN; tokens are counted
exactly, where a mask in bf16, which SkyRL makes, is rounded to 8 bits past 256; fp64 stays fp64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klfast.api import reduce
from klfast.compat.divergences import FORWARD, check_per_token, check_same_shape, distill
from klfast.compat.logits import entropy
from klfast.dtypes import wide_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def draft_soft_ce(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    global_normalization_factor: float | Tensor | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The masked mean of the soft cross-entropy, a 0-dim tensor, in nats.

    Args:
        student_logits: [B, T, V].
        teacher_logits: [B, T, V], detached; cut both to the words that exist (a view will do).
        mask: [B, T], which tokens exist, and their weights.
        global_normalization_factor: divides the sum instead of that of the mask. Below 1 either
            counts as 1. Under DDP and FSDP, which average gradients, the number of all ranks has
            to be divided by the world size unless the loss is multiplied by it.
        vocab_parallel_group: None, or a group of one: klfast does not add up shards here.
        chunk_size: of no use: there is no temporary that it could make smaller.

    Raises:
        ValueError: a wrong shape, a teacher with a gradient, or a vocabulary in shards.
    """
    _check(student_logits, teacher_logits, mask, vocab_parallel_group)
    normalizer = _normalizer(mask, global_normalization_factor)
    divergence = distill(
        FORWARD,
        student_logits,
        teacher_logits,
        mask,
        reduction="token-mean",
        normalizer=normalizer,
    )
    entropies = entropy(teacher_logits, mask=mask)
    return divergence + reduce(entropies, mask, reduction="token-mean", normalizer=normalizer)


def draft_soft_ce_topk(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    k: int,
    global_normalization_factor: float | Tensor | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    roll_shift: int = 0,
) -> Tensor:
    """The same in nats over the teacher's ``k`` likeliest words, renormalized in both models.

    ``torch.topk`` finds them; ``roll_shift`` moves them, [B, T, k], as many tokens to the left. The
    other arguments and errors are those of :func:`draft_soft_ce`.
    """
    _check(student_logits, teacher_logits, mask, vocab_parallel_group)
    words, indices = teacher_logits.topk(min(k, teacher_logits.shape[-1]), dim=-1)
    if roll_shift:
        words, indices = (torch.roll(t, -roll_shift, dims=1) for t in (words, indices))
    few = student_logits.gather(-1, indices)
    return draft_soft_ce(few, words, mask, global_normalization_factor)


def _check(student: Tensor, teacher: Tensor, mask: Tensor, group: ProcessGroup | None) -> None:
    check_same_shape("teacher_logits", teacher, "student_logits", student)
    check_per_token("mask", mask, "student_logits", student)
    if teacher.requires_grad:
        raise ValueError("teacher_logits must be detached, got a tensor that requires a gradient")
    if group is not None and torch.distributed.get_world_size(group) > 1:
        raise ValueError(
            "vocab_parallel_group must be None or a group of one, as klfast does not add up shards "
            f"of a vocabulary here, got one of {torch.distributed.get_world_size(group)}"
        )


def _normalizer(mask: Tensor, factor: float | Tensor | None) -> float | Tensor:
    """At least 1."""
    if factor is None:
        return mask.sum(dtype=wide_dtype(mask.device)).clamp(min=1)
    return factor.clamp(min=1) if isinstance(factor, Tensor) else max(1.0, factor)
