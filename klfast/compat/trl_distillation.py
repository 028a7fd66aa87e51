"""TRL's distillation losses over a whole vocabulary, of 1.16: ``trl.experimental.gkd``, and
``loss_utils`` of ``trl.experimental.sdft`` and ``trl.experimental.sdpo``.

p = softmax of the student, q of the teacher. ``klfast.compat.divergences`` has what ``beta`` and
``alpha`` mean, what is read and made, and what differs from TRL; gradients reach the student, and
the teacher if it requires them.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from klfast.checks.arguments import check_number
from klfast.checks.values import are_tracing, checks_requested, holds_values
from klfast.compat.divergences import (
    check_per_token,
    check_same_shape,
    distill,
    interpolated,
    kept,
)
from klfast.names import ReductionName


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: float | Tensor | None = None,
) -> Tensor:
    """``GKDTrainer.generalized_jsd_loss``: a 0-dim tensor, in nats.

    Args:
        student_logits: [B, T, V], or [N, V].
        teacher_logits: of the same shape: one vocabulary, as in TRL.
        labels: [B, T] or [N], -100 where the token does not exist: its row is not read.
        beta: 0 is the forward KL(q || p), 1 the reverse KL(p || q), between them the generalized
            Jensen-Shannon divergence.
        temperature: of both.
        reduction: of the per-token divergences, ``"batchmean"``: their mean over kept tokens, or
            without labels their sum / the first dimension; ``"sum"``; ``"mean"``: their mean over
            tokens / V, as TRL's is over the terms of all words.
        num_items_in_batch: instead of all that, the sum / this number > 0. Under DDP and FSDP,
            which average gradients, the number of all ranks has to be divided by the world size
            unless the loss is multiplied by it.

    Differs from TRL, besides the module's list: rows of ignored tokens are not copied; the mean of
    nothing is 0, where ``"mean"`` is NaN there.

    Raises:
        ValueError: a wrong shape, ``beta`` or number, or ``reduction="none"``, which in TRL is the
            terms of every word: ``klfast.kl_divergence`` gives them summed, per token.

    Source: R. Agarwal et al., "On-Policy Distillation of Language Models" (2024, arXiv:2306.13649).
    """
    check_same_shape("teacher_logits", teacher_logits, "student_logits", student_logits)
    mask = None
    if labels is not None:
        check_per_token("labels", labels, "student_logits", student_logits)
        mask = kept(labels)
    return distill(
        interpolated("beta", beta),
        student_logits,
        teacher_logits,
        mask,
        temperature=temperature,
        **reduced(reduction, num_items_in_batch, student_logits, mask),
    )


class Reduction(TypedDict, total=False):
    """Options of ``distill``."""

    reduction: ReductionName
    normalizer: float | Tensor
    coef: float


def reduced(
    reduction: str,
    number: float | Tensor | None,
    logits: Tensor,
    mask: Tensor | None,
    terms: int | None = None,
) -> Reduction:
    """How a sum over tokens is divided. ``terms``: of a token, if not as many as words."""
    if number is not None:
        return {
            "reduction": "token-mean",
            "normalizer": _positive("num_items_in_batch", number),
        }
    if reduction == "batchmean":
        if mask is not None:
            return {"reduction": "token-mean"}
        return {"reduction": "token-mean", "normalizer": max(1, logits.shape[0])}
    if reduction == "mean":
        return {"reduction": "token-mean", "coef": 1 / (terms or logits.shape[-1])}
    if reduction == "sum":
        return {"reduction": "token-sum"}
    raise ValueError(
        "reduction must be 'batchmean', 'sum' or 'mean', as klfast makes no terms of every word "
        f"(klfast.kl_divergence gives divergences per token), got {reduction!r}"
    )


def _positive(argument: str, count: float | Tensor) -> float | Tensor:
    """The count, > 0.

    Raises:
        TypeError, ValueError: it is not. The value of a GPU's tensor is not read, because that
            needs a sync, unless ``KLFAST_CHECK=1`` asks for it.
    """
    if not isinstance(count, Tensor):
        is_symbolic = torch.compiler.is_compiling() and type(count) in (int, float)
        return count if is_symbolic else check_number(argument, count, above=0)
    if count.dim() != 0:
        raise ValueError(
            f"{argument} must be a number or a 0-dim tensor, got a tensor of shape "
            f"{list(count.shape)}"
        )
    if holds_values(count) or (checks_requested() and not are_tracing()):
        check_number(argument, count.item(), above=0)
    return count


def compute_divergence(
    student_log_probs: Tensor, teacher_log_probs: Tensor, alpha: float
) -> Tensor:
    """SDFT's and SDPO's divergence of every token, [..., V] -> [...], in nats.

    ``alpha``: 0 is the forward KL(q || p), 1 the reverse KL(p || q), between them the generalized
    Jensen-Shannon divergence. V may be the vocabulary, or, as TRL uses it too, a few words whose
    log-probs sum to one: the likeliest K renormalised, or with a bucket for all others.

    Log-probs are logits to klfast, which makes distributions of them: what they do not sum to one
    for rounding is not in the value, and the gradient to the log-probs differs from TRL's by
    multiples of p and of q, which whatever made them sum to one takes out (see
    ``common.full_kl``). Log-probs of a part of a vocabulary that do not sum to one are none.

    Raises:
        ValueError: shapes that differ, or an ``alpha`` that is not between 0 and 1.
    """
    check_same_shape("teacher_log_probs", teacher_log_probs, "student_log_probs", student_log_probs)
    return distill(interpolated("alpha", alpha), student_log_probs, teacher_log_probs)


def compute_full_logit_self_distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    distillation_alpha: float,
    mask: Tensor | None = None,
) -> Tensor:
    """The same of logits: SDFT's and SDPO's ``full_logits`` loss per token.

    In nats, [..., V] -> [...].

    Args:
        student_logits: [..., V].
        teacher_logits: of the same shape.
        distillation_alpha: ``alpha`` of :func:`compute_divergence`.
        mask: klfast's own, [...]: a token's weight; where it is 0 the row is not read, the value is
            0, and the gradient too. TRL multiplies by its mask later.

    Raises:
        ValueError: a wrong shape, or a ``distillation_alpha`` that is not between 0 and 1.
    """
    check_same_shape("teacher_logits", teacher_logits, "student_logits", student_logits)
    if mask is not None:
        check_per_token("mask", mask, "student_logits", student_logits)
    return distill(
        interpolated("distillation_alpha", distillation_alpha), student_logits, teacher_logits, mask
    )
