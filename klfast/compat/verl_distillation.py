"""verl's distillation from a teacher's K likeliest words, of 0.8 to 0.9 and main: the function of
``verl.trainer.distillation.fsdp.losses``, which its FSDP engines call with the logits.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from klfast.compat.divergences import check_k_words
from klfast.dtypes import wide
from klfast.logits.api import token_logprobs
from klfast.logits.entries import divergence_of_entries


def compute_forward_kl_topk(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    """The truncated forward KL of every token, in nats, and what verl logs beside it, [1, N] each.

    ``sum over the teacher's K words of q log(q / p)``, with p = softmax(student_logits) and q the
    teacher's probabilities: ``klfast.topk_kl_divergence`` with the tail ``"drop"``. That is no
    divergence: it may be negative, and where the models are equal its gradient is not 0, but takes
    probability from all other words for the K. verl makes negative values 0 afterwards, in
    ``verl.trainer.distillation.losses``, which ends the gradient of those tokens: this function
    does not, and ``patch`` leaves that one as it is. The tail ``"bucket"`` needs no such limit.

    The logits are read once for all, and once more for their likeliest words; nothing of their size
    is made but the gradient, with ``use_chunked_topk`` and without.

    Args:
        student_logits: [1, N, V], divided by the temperature, as verl's engines do it.
        teacher_topk_log_probs: nested, [B, length, K], N tokens together; or [1, N, K].
        teacher_topk_ids: of the same shape; a word may be there twice, and is added twice. Under
            Ulysses sequence parallelism this rank's part of both is taken, as in verl.
        config: verl's ``DistillationConfig``, of which ``distillation_loss.log_prob_min_clamp`` is
            read: the least log-prob of both models, below which the student has no gradient. None:
            no limit.
        data_format: of no use, as in verl.

    Returns:
        ``distillation_losses``; ``student_mass`` and ``teacher_mass``, the probabilities' sums over
        the K words; ``overlap_count``, how many of them are among the student's K likeliest;
        ``overlap_token_advantage``, the mean of ``-q log(q / p)`` over these.

    Differs from verl: fp32 for lower dtypes, and fp64 stays fp64; only the first result has a
    gradient, as with Megatron; a log-prob of -inf adds 0 without a clamp, where theirs is NaN. Of
    words that are equally likely to the student ``overlap_count`` may count others.

    Raises:
        ValueError: log-probs and ids that have not the shape of the logits' tokens, [1, N, K].
    """
    logprobs, ids = (_of_this_rank(each) for each in (teacher_topk_log_probs, teacher_topk_ids))
    check_k_words(
        "student_logits", student_logits, teacher_topk_log_probs=logprobs, teacher_topk_ids=ids
    )
    picked = token_logprobs(student_logits, ids)
    student, teacher = wide(picked), wide(logprobs)
    masses = {
        f"{name}_mass": of.detach().exp().sum(-1).to(picked.dtype)
        for name, of in (("student", student), ("teacher", teacher))
    }
    least = config.distillation_loss.log_prob_min_clamp
    if least is not None:
        student, teacher = student.clamp_min(least), teacher.clamp_min(least)
    losses = _forward(teacher, student, torch.ones_like(ids, dtype=torch.bool))
    return {
        "distillation_losses": losses.to(picked.dtype),
        **masses,
        **_overlap(student_logits, ids, teacher, student, picked.dtype),
    }


def _of_this_rank(teacher: Tensor) -> Tensor:
    """What verl has of its teacher as [1, N, K], of N tokens or of this rank's part of them."""
    packed = teacher.values().unsqueeze(0) if teacher.is_nested else teacher
    ulysses: Any = sys.modules.get("verl.utils.ulysses")
    if ulysses is None or ulysses.get_ulysses_sequence_parallel_world_size() == 1:
        return packed
    part: Tensor = ulysses.slice_input_tensor(packed, dim=1)
    return part


def _forward(teacher: Tensor, student: Tensor, exist: Tensor) -> Tensor:
    return divergence_of_entries(teacher, student, exist, "forward", "drop", 0.5)


@torch.no_grad()
def _overlap(
    logits: Tensor, ids: Tensor, teacher: Tensor, student: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Of the words that are among the student's as many likeliest: their number, and their mean."""
    likeliest = logits.topk(ids.shape[-1]).indices.sort(-1).values
    ids = ids.to(likeliest.dtype).contiguous()
    at = torch.searchsorted(likeliest, ids).clamp(max=ids.shape[-1] - 1)
    shared = likeliest.gather(-1, at) == ids
    count = shared.sum(-1)
    mean = -_forward(teacher, student, shared) / count.clamp(min=1)
    return {"overlap_count": count, "overlap_token_advantage": mean.to(dtype)}
