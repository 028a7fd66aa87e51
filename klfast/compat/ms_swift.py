"""ms-swift: the KL that its GRPO trainers write inline, its entropies, and its distillation losses.

``per_token_kl`` and ``sequence_kl`` compute what the trainers have inline. ``sequence_kl`` and the
log-probs that ms-swift takes from TRL are ``klfast.compat.trl``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from klfast.compat.common import IGNORED, check_shapes, per_token, tensor_parallel_group
from klfast.compat.divergences import distill, interpolated
from klfast.compat.presets import MS_SWIFT
from klfast.compat.trl import entropy_from_logits, sequence_kl
from klfast.functional.logits import kl_divergence

__all__ = [
    "entropy_from_logits",
    "gkd_loss",
    "jsd_loss",
    "per_token_k1",
    "per_token_kl",
    "sequence_kl",
    "vocab_parallel_kl_div",
]


def per_token_kl(
    per_token_logps: Tensor, ref_per_token_logps: Tensor, *, exact: bool = False
) -> Tensor:
    """k3 of every token [B, T], in nats: the log-ratio limited to 20, the value to 10.

    Like ms-swift's, the gradient is 0 once ``per_token_logps - ref_per_token_logps < -2.61``.
    """
    return per_token(per_token_logps, ref_per_token_logps, MS_SWIFT["k3"], exact=exact)


def per_token_k1(
    old_per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """k1 of every token [B, T], in nats, 0 where masked, as ``kl_in_reward`` takes it."""
    return per_token(
        old_per_token_logps, ref_per_token_logps, MS_SWIFT["k1"], completion_mask, exact=exact
    )


def vocab_parallel_kl_div(input_log_probs: Tensor, target_log_probs: Tensor) -> Tensor:
    """KL(target || input) of log-probs [..., V / ranks], [...], in nats, on every rank.

    Megatron's tensor parallelism defines the ranks. -inf under both adds 0, where ms-swift's is
    NaN. Gradients treat the log-probs as logits, which is the same behind a log-softmax.
    """
    rows = input_log_probs.shape[:-1]
    one_sequence = [x.reshape(1, -1, x.shape[-1]) for x in (input_log_probs, target_log_probs)]
    group = tensor_parallel_group()
    return kl_divergence(*one_sequence, direction="forward", group=group).view(rows)


# Distillation: ``swift.rlhf_trainers.gkd_loss``. p = softmax of the student, q of the teacher.


def jsd_loss(
    s_logits: Tensor,
    t_logits: Tensor,
    beta: float,
    log_softmax_fn: Callable[..., Tensor] | None = None,
    kl_div_fn: Callable[..., Tensor] | None = None,
    chunk_size: int = 512,
) -> Tensor:
    """The sum over tokens of their divergences, 0-dim, in nats.

    Args:
        s_logits: [N, V], of the student, over the temperature.
        t_logits: [N, V], of the teacher.
        beta: 0 is the forward KL(q || p), 1 the reverse KL(p || q), between them the generalized
            Jensen-Shannon divergence.
        log_softmax_fn: None: klfast has its own, over a whole vocabulary.
        kl_div_fn: None.
        chunk_size: of no use.

    Raises:
        ValueError: shapes that differ, a ``beta`` that is not between 0 and 1, or functions for a
            vocabulary in shards.
    """
    _check_own_functions(log_softmax_fn, kl_div_fn)
    check_shapes(("s_logits", s_logits, "... V"), ("t_logits", t_logits, "... V"))
    return distill(interpolated("beta", beta), s_logits, t_logits, reduction="token-sum")


def gkd_loss(
    student_logits: Tensor,
    teacher_output: Any,
    labels: Tensor,
    beta: float,
    temperature: float,
    gather_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    log_softmax_fn: Callable[..., Tensor] | None = None,
    kl_div_fn: Callable[..., Tensor] | None = None,
    chunk_size: int = 512,
) -> tuple[Tensor, Tensor]:
    """ms-swift's GKD loss: (sum over tokens of their divergences in nats, number of tokens).

    The teacher has ``full_logits``, or ``topk_logprobs`` and ``topk_indices`` of K token ids, which
    take precedence. Both models are then made distributions over those K ids, as in ms-swift. With
    K = 1 the loss is therefore 0 for every student. ``klfast.topk_kl_divergence`` with the tail
    ``"bucket"`` compares all other ids as one more category.

    If one model has a larger vocabulary than the other (padding), the smaller is filled up with the
    larger one's logits, as in ms-swift. That copies the smaller. If the teacher's labels have other
    positions than the student's (OPSD), the rows of both are copied side by side. That check costs
    a GPU one sync, unless both labels are one tensor. ms-swift's own code has several syncs.

    Args:
        student_logits: [B, T, V].
        teacher_output: ms-swift's ``TeacherOutput``, or an object with its attributes
            ``full_logits`` [B, T, W], ``topk_logprobs`` and ``topk_indices`` [B, T, K], and
            ``labels`` [B, T] (None: the student's). The other attributes are None. If all K
            log-probs of a token are infinite, the token does not count.
        labels: [B, T], -100 where the token does not exist: its row is not read.
        beta: see :func:`jsd_loss`.
        temperature: of both models, and of the teacher's K log-probs too.
        gather_fn: (logits [N, V], indices [N, K]) -> [N, K], the logits of the K ids, such as from
            shards of the vocabulary. The rows are copied for it. None: a whole vocabulary.
        log_softmax_fn: None with ``full_logits``, like the next, because klfast has its own over a
            whole vocabulary. As in ms-swift, K ids need none.
        kl_div_fn: see there.
        chunk_size: see :func:`jsd_loss`.

    Returns:
        Two 0-dim tensors; the number is int64.

    Raises:
        ValueError: a shape or number is wrong, teacher and student have different numbers of
            labels, the teacher is empty, or ``full_logits`` come with functions for a sharded
            vocabulary.
    """
    divergence = interpolated("beta", beta)
    check_shapes(("student_logits", student_logits, "... V"), ("labels", labels, "..."))
    few = teacher_output.topk_logprobs is not None and teacher_output.topk_indices is not None
    parts: tuple[Tensor, ...]
    if few:
        parts = (teacher_output.topk_logprobs, teacher_output.topk_indices)
    elif teacher_output.full_logits is not None:
        _check_own_functions(log_softmax_fn, kl_div_fn)
        parts = (teacher_output.full_logits,)
    else:
        raise ValueError(
            "teacher_output must have full_logits, or topk_logprobs and topk_indices, got neither"
        )
    as_rows = few and gather_fn is not None
    student, parts, mask = _aligned(student_logits, parts, labels, teacher_output.labels, as_rows)
    if few:
        student, teacher, mask = _of_few_ids(student, parts[0], parts[1], mask, gather_fn)
    else:
        student, teacher = _with_one_vocabulary(student, parts[0])
    check_shapes(("student_logits", student, "... V"), ("teacher_output", teacher, "... V"))
    total = distill(
        divergence, student, teacher, mask, temperature=temperature, reduction="token-sum"
    )
    return total, mask.sum()


def _check_own_functions(*functions: Callable[..., Tensor] | None) -> None:
    if any(function is not None for function in functions):
        raise ValueError(
            "log_softmax_fn and kl_div_fn must be None: klfast has its own softmax and divergence, "
            "for a whole vocabulary and not for a shard"
        )


def _aligned(
    student: Tensor,
    parts: tuple[Tensor, ...],
    labels: Tensor,
    teacher_labels: Tensor | None,
    as_rows: bool,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Student and teacher token by token, or [N, ...] of the existing tokens; and which exist."""
    mask = others = labels != IGNORED
    if teacher_labels is not None and teacher_labels is not labels:
        others = teacher_labels != IGNORED
    same = others is mask or (others.shape == mask.shape and torch.equal(others, mask))
    # Labels of the same positions need no copy of the logits.
    if same and not as_rows:
        return student, parts, mask
    rows, other_rows = student[mask], tuple(part[others] for part in parts)
    if len(rows) != len(other_rows[0]):
        raise ValueError(
            "teacher_output.labels must keep as many tokens as labels, "
            f"{len(rows)}, got {len(other_rows[0])}"
        )
    return rows, other_rows, mask.new_ones(len(rows))


def _of_few_ids(
    student: Tensor,
    logprobs: Tensor,
    indices: Tensor,
    mask: Tensor,
    gather_fn: Callable[[Tensor, Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both models' values at the K ids, [..., K], and the tokens that have any in the teacher."""
    mask = mask & ~logprobs.isinf().all(-1)
    # A token that does not exist may have any number for an id, and no gather accepts that.
    indices = torch.where(mask.unsqueeze(-1), indices, 0)
    words = student.gather(-1, indices) if gather_fn is None else gather_fn(student, indices)
    return words, logprobs, mask


def _with_one_vocabulary(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [..., V] and [..., W], with missing entries taken from the other model."""
    words, others = student.shape[-1], teacher.shape[-1]
    # The other model's logits, because a padded entry has no meaning and both then agree on it.
    if words < others:
        student = torch.cat([student, teacher[..., words:].to(student.dtype)], -1)
    elif others < words:
        teacher = torch.cat([teacher, student[..., others:].to(teacher.dtype)], -1)
    return student, teacher
