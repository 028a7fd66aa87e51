"""TRL's distillation losses over a few words of each token, of 1.16: those of
``trl.experimental.sdft``, ``sdpo`` and ``iw_opd``, and the bucket that they and TRL's distillation
from a server add for all other words.

p = softmax of the student, q of the teacher. ``klfast.compat.divergences`` has what ``beta`` and
``alpha`` mean. With the bucket, K words and what is left of each model, 1 - sum, are compared:
``klfast.topk_kl_divergence``. Without it both models are made distributions over the K words, which
takes no read of the vocabulary, and is 0 of one word whatever the models say.

Differs from TRL, besides that module's list: a bucket is at least 2^-24, and theirs 1e-7. Where it
would be less, TRL's has no gradient; klfast's has it down to 2^-24, and all of its digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.compat.divergences import (
    FORWARD,
    REVERSE,
    Divergence,
    batched,
    check_per_token,
    check_same_shape,
    distill,
    interpolated,
    kept,
)
from klfast.compat.trl_distillation import Reduction, reduced
from klfast.dtypes import wide
from klfast.logits.api import token_logprobs, topk_kl_divergence
from klfast.logits.entries import log_tail


def add_tail_bucket(log_probs: Tensor) -> Tensor:
    """SDFT's and SDPO's: log-probs of K words, and of all others together, [..., K + 1], in nats.

    The last is ``log(1 - sum(exp(log_probs)))`` over [..., K], by fp64 arithmetic, in the dtype of
    the log-probs. A log-prob of -inf adds nothing. Gradients reach the log-probs.

    Differs from TRL: see above; where all K are -inf the gradient is 0, not NaN.
    """
    tail = log_tail(wide(log_probs), torch.ones_like(log_probs, dtype=torch.bool))
    return torch.cat([log_probs, tail.to(log_probs.dtype)], -1)


def add_tail_bucket_and_mask(log_probs: Tensor, valid_mask: Tensor) -> tuple[Tensor, Tensor]:
    """``_add_tail_bucket`` of IW-OPD and of TRL's distillation from a server, in nats.

    :func:`add_tail_bucket`, and ``valid_mask`` [..., K] with an entry for the bucket, which is
    valid: [..., K + 1] both.
    """
    is_valid = torch.ones_like(valid_mask[..., :1], dtype=torch.bool)
    return add_tail_bucket(log_probs), torch.cat([valid_mask, is_valid], -1)


def compute_topk_self_distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    distillation_topk: int,
    distillation_alpha: float,
    distillation_add_tail: bool,
    mask: Tensor | None = None,
) -> Tensor:
    """SDFT's and SDPO's loss per token over the student's likeliest words, in nats.

    Args:
        student_logits: [..., V]. Gradients reach both models.
        teacher_logits: of the same shape.
        distillation_topk: K, the number of words.
        distillation_alpha: 0 is the forward KL(q || p), 1 the reverse KL(p || q), between them the
            generalized Jensen-Shannon divergence.
        distillation_add_tail: compare a bucket of all other words too.
        mask: klfast's own, [...]: a token's weight; where it is 0 the value is 0, and the gradient
            too. TRL multiplies by its mask later.

    Returns:
        [...].

    Raises:
        ValueError: a wrong shape, or a ``distillation_alpha`` that is not between 0 and 1.

    Sources: J. Hübotter et al., "Reinforcement Learning via Self-Distillation" (2026,
    arXiv:2601.20802); I. Shenfeld et al., "Self-Distillation Enables Continual Learning" (2026,
    arXiv:2601.19897).
    """
    check_same_shape("teacher_logits", teacher_logits, "student_logits", student_logits)
    if mask is not None:
        check_per_token("mask", mask, "student_logits", student_logits)
    divergence = interpolated("distillation_alpha", distillation_alpha)
    words, ids = student_logits.topk(distillation_topk)
    if distillation_add_tail:
        return _with_tail(divergence, student_logits, teacher_logits, ids, None, mask)
    return distill(divergence, words, teacher_logits.gather(-1, ids), mask)


def iw_opd_generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    top_k: int = 0,
    add_tail: bool = True,
    num_items_in_batch: float | Tensor | None = None,
) -> Tensor:
    """``IWOPDTrainer.generalized_jsd_loss``: a 0-dim tensor, in nats.

    Args:
        student_logits: [B, T, V], or [N, V]. Gradients reach both models.
        teacher_logits: of the same shape.
        labels: [B, T] or [N], -100 where the token does not exist.
        beta: 0 is the forward KL(q || p), 1 the reverse KL(p || q), between them the generalized
            Jensen-Shannon divergence.
        temperature: of both.
        reduction: of the per-token divergences, ``"batchmean"``: their mean over kept tokens, or
            without labels their sum / the first dimension; ``"sum"``; ``"mean"``: their mean over
            tokens / the number of categories, which of both models' words is 2 ``top_k``, and one
            more with a bucket.
        top_k: compare so many words alone, the teacher's likeliest for the forward KL, the
            student's for the reverse, both models' between. 0, or V and more: all.
        add_tail: compare a bucket of all other words too.
        num_items_in_batch: instead of ``reduction``, the sum / this number > 0. Under DDP and FSDP,
            which average gradients, the number of all ranks has to be divided by the world size
            unless the loss is multiplied by it.

    Raises:
        ValueError: a wrong shape, ``beta`` or number, or ``reduction="none"``, which in TRL is the
            terms of every category.
    """
    check_same_shape("teacher_logits", teacher_logits, "student_logits", student_logits)
    mask = None
    if labels is not None:
        check_per_token("labels", labels, "student_logits", student_logits)
        mask = kept(labels)
    divergence = interpolated("beta", beta)
    if not 0 < top_k < student_logits.shape[-1]:
        options = reduced(reduction, num_items_in_batch, student_logits, mask)
        return distill(
            divergence, student_logits, teacher_logits, mask, temperature=temperature, **options
        )
    ids, exist = _support(divergence, student_logits, teacher_logits, top_k)
    terms = ids.shape[-1] + bool(add_tail)
    options = reduced(reduction, num_items_in_batch, student_logits, mask, terms)
    if add_tail:
        return _with_tail(
            divergence, student_logits, teacher_logits, ids, exist, mask, temperature, options
        )
    student, teacher = (logits.gather(-1, ids) for logits in (student_logits, teacher_logits))
    if exist is not None:
        student, teacher = (logits.masked_fill(~exist, -torch.inf) for logits in (student, teacher))
    return distill(divergence, student, teacher, mask, temperature=temperature, **options)


def _with_tail(
    divergence: Divergence,
    student: Tensor,
    teacher: Tensor,
    ids: Tensor,
    exist: Tensor | None,
    mask: Tensor | None,
    temperature: float = 1.0,
    options: Reduction | None = None,
) -> Tensor:
    """The divergence of K words [..., K], of which some ``exist`` (None: all), and a bucket."""
    logprobs = token_logprobs(teacher, ids, mask, temperature=temperature)
    if exist is not None:
        logprobs = logprobs.masked_fill(~exist, -torch.inf)
    value = topk_kl_divergence(
        batched(student),
        batched(ids),
        batched(logprobs),
        None if mask is None else batched(mask.unsqueeze(-1)).squeeze(-1),
        direction=divergence.direction,
        jsd_beta=divergence.jsd_beta,
        temperature=temperature,
        **options or {},
    )
    return value if options else value.view(student.shape[:-1])


@torch.no_grad()
def _support(
    divergence: Divergence, student: Tensor, teacher: Tensor, k: int
) -> tuple[Tensor, Tensor | None]:
    """The words that IW-OPD compares, and which of them exist: a word of both models does once."""
    models = {FORWARD: (teacher,), REVERSE: (student,)}.get(divergence, (teacher, student))
    ids = torch.cat([logits.topk(k).indices for logits in models], -1)
    if len(models) == 1:
        return ids, None
    ordered, places = ids.sort(dim=-1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ids, torch.empty_like(again).scatter_(-1, places, ~again)
