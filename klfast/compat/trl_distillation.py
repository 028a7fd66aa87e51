"""TRL's distillation losses, of 1.16: ``trl.experimental.gkd``, ``loss_utils`` of
``trl.experimental.sdft`` and ``sdpo``, and ``trl.experimental.iw_opd``.

p is the student's softmax and q the teacher's. ``klfast.compat.divergences`` explains ``beta`` and
``alpha``, and the memory that is read and made. Gradients reach both models.

Some losses compare only K token ids at each position. With the bucket they use
``klfast.topk_kl_divergence`` over the K ids and each model's remaining probability, 1 - sum.
Without the bucket both models are made distributions over the K ids. That takes no read of the
vocabulary, and with K = 1 the loss is 0 for all models. Differs from TRL: a bucket is at least
2^-24, and TRL's 1e-7. A smaller bucket has no gradient in TRL. klfast's has its gradient down to
2^-24, with all digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast import backends
from klfast.args.logits import Logits
from klfast.args.rows import RowsArgs
from klfast.args.signature import Tokens
from klfast.compat.common import IGNORED, check_shapes
from klfast.compat.divergences import (
    FORWARD,
    REVERSE,
    Interpolation,
    LossOptions,
    batched,
    batched_mask,
    check_models,
    distill,
    interpolated,
    positive_count,
)
from klfast.formulas.topk import log_tail
from klfast.functional.logits import topk_kl_divergence
from klfast.types.dtypes import wide


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
        reduction: of the per-token divergences. ``"batchmean"`` is their mean over kept tokens, or
            without labels their sum / the first dimension. ``"sum"`` is their sum. ``"mean"`` is
            their mean over tokens / V, because TRL's mean is over the terms of all token ids. The
            mean of nothing is 0.
        num_items_in_batch: replaces the reduction by the sum / this number > 0. DDP and FSDP
            average gradients, so divide the number of all ranks by the world size, or multiply the
            loss by the world size.

    Raises:
        ValueError: a wrong shape, ``beta`` or number, or ``reduction="none"``. In TRL that gives
            the terms of every token id. ``klfast.kl_divergence`` gives their sum per token.

    Source: R. Agarwal et al., "On-Policy Distillation of Language Models" (2024, arXiv:2306.13649).
    """
    return iw_opd_generalized_jsd_loss(
        student_logits,
        teacher_logits,
        labels,
        beta,
        temperature,
        reduction,
        num_items_in_batch=num_items_in_batch,
    )


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

    :func:`generalized_jsd_loss` describes ``student_logits``, ``teacher_logits``, ``labels``,
    ``beta``, ``temperature``, ``num_items_in_batch`` and the errors. The loss compares ``top_k``
    token ids: the teacher's most likely for the forward KL, the student's for the reverse KL, and
    both models' between. 0, or V and more, means all. ``add_tail`` adds a bucket of all other
    token ids. ``reduction="mean"`` divides by the number of categories: 2 ``top_k`` for both
    models' token ids, and one more with a bucket.
    """
    check_models(student_logits, teacher_logits, labels=labels)
    mask = None if labels is None else labels != IGNORED
    divergence = interpolated("beta", beta)
    models = student_logits, teacher_logits
    if not 0 < top_k < student_logits.shape[-1]:
        options = _reduced(reduction, num_items_in_batch, student_logits, mask)
        return distill(divergence, *models, mask, temperature=temperature, **options)
    ids, exist = _support(divergence, *models, top_k)
    terms = ids.shape[-1] + bool(add_tail)
    options = _reduced(reduction, num_items_in_batch, student_logits, mask, terms)
    if add_tail:
        return _with_tail(divergence, *models, ids, exist, mask, temperature, options)
    student, teacher = (logits.gather(-1, ids) for logits in models)
    if exist is not None:
        student, teacher = (logits.masked_fill(~exist, -torch.inf) for logits in (student, teacher))
    return distill(divergence, student, teacher, mask, temperature=temperature, **options)


def _reduced(
    reduction: str,
    number: float | Tensor | None,
    logits: Tensor,
    mask: Tensor | None,
    terms: int | None = None,
) -> LossOptions:
    """How a sum over tokens is divided. ``terms``: of a token, if not as many as token ids."""
    if number is not None:
        count = positive_count("num_items_in_batch", number)
        return {"reduction": "token-mean", "normalizer": count}
    if reduction == "batchmean":
        if mask is not None:
            return {"reduction": "token-mean"}
        return {"reduction": "token-mean", "normalizer": max(1, logits.shape[0])}
    if reduction == "mean":
        return {"reduction": "token-mean", "coef": 1 / (terms or logits.shape[-1])}
    if reduction == "sum":
        return {"reduction": "token-sum"}
    raise ValueError(
        f"reduction must be 'batchmean', 'sum' or 'mean', got {reduction!r}: klfast does not make "
        "the terms of every token id; klfast.kl_divergence gives a divergence per token"
    )


def compute_divergence(
    student_log_probs: Tensor, teacher_log_probs: Tensor, alpha: float
) -> Tensor:
    """SDFT's and SDPO's divergence of every token, [..., V] -> [...], in nats.

    ``alpha``: 0 is the forward KL(q || p), 1 the reverse KL(p || q), between them the generalized
    Jensen-Shannon divergence. V may be the vocabulary, or, as TRL uses it too, a few categories
    whose probabilities sum to one: the K most likely ids renormalized, or with a bucket for all
    others.

    klfast treats the log-probs as logits and makes distributions of them. An error in their sum by
    rounding is therefore not in the value. The gradient to the log-probs differs from TRL's by
    multiples of p and of q. The softmax before the log-probs removes these multiples (see
    ``divergences.full_kl``). Don't pass log-probs of a part of a vocabulary that do not sum to one,
    because they are no distribution.

    Raises:
        ValueError: shapes that differ, or an ``alpha`` that is not between 0 and 1.
    """
    check_shapes(
        ("student_log_probs", student_log_probs, "... V"),
        ("teacher_log_probs", teacher_log_probs, "... V"),
    )
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
        mask: klfast's own, a weight per token, [...]. Where it is 0 the row is not read, and the
            value and its gradient are 0. TRL multiplies by its mask later.

    Raises:
        ValueError: a wrong shape, or a ``distillation_alpha`` that is not between 0 and 1.
    """
    check_models(student_logits, teacher_logits, mask=mask)
    divergence = interpolated("distillation_alpha", distillation_alpha)
    return distill(divergence, student_logits, teacher_logits, mask)


def add_tail_bucket(log_probs: Tensor) -> Tensor:
    """SDFT's and SDPO's: log-probs of K tokens, and of all others together, [..., K + 1], in nats.

    The last is ``log(1 - sum(exp(log_probs)))`` over [..., K], by fp64 arithmetic, in the dtype of
    the log-probs. A log-prob of -inf adds nothing. Gradients reach the log-probs; where all K are
    -inf the gradient is 0, and NaN in TRL.
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
    """SDFT's and SDPO's loss per token over the student's most likely tokens, in nats.

    [..., V] -> [...]. :func:`compute_full_logit_self_distillation_loss` describes
    ``student_logits``, ``teacher_logits``, ``distillation_alpha``, ``mask`` and the errors.
    ``distillation_topk`` is K, the number of token ids. ``distillation_add_tail`` adds a bucket of
    all other token ids.

    Sources: J. Hübotter et al., "Reinforcement Learning via Self-Distillation" (2026,
    arXiv:2601.20802); I. Shenfeld et al., "Self-Distillation Enables Continual Learning" (2026,
    arXiv:2601.19897).
    """
    check_models(student_logits, teacher_logits, mask=mask)
    divergence = interpolated("distillation_alpha", distillation_alpha)
    few, ids = student_logits.topk(distillation_topk)
    if distillation_add_tail:
        return _with_tail(divergence, student_logits, teacher_logits, ids, None, mask)
    return distill(divergence, few, teacher_logits.gather(-1, ids), mask)


def _with_tail(
    divergence: Interpolation,
    student: Tensor,
    teacher: Tensor,
    ids: Tensor,
    exist: Tensor | None,
    mask: Tensor | None,
    temperature: float = 1.0,
    options: LossOptions | None = None,
) -> Tensor:
    """The divergence of K tokens [..., K], of which some ``exist`` (None: all), and a bucket."""
    tokens = Tokens.of("token_logprobs", teacher)
    args = RowsArgs.of(tokens, Logits.of(tokens), mask=mask, temperature=temperature, token_ids=ids)
    # The teacher's 1 - sum has no more digits than its log-probs.
    logprobs = backends.rows("auto", args._replace(rounds_logprobs=False)).of_tokens()
    assert isinstance(logprobs, Tensor)
    if exist is not None:
        logprobs = logprobs.masked_fill(~exist, -torch.inf)
    value = topk_kl_divergence(
        batched(student),
        batched(ids),
        batched(logprobs),
        batched_mask(mask),
        direction=divergence.direction,
        jsd_beta=divergence.jsd_beta,
        temperature=temperature,
        **options or {},
    )
    return value if options else value.view(student.shape[:-1])


@torch.no_grad()
def _support(
    divergence: Interpolation, student: Tensor, teacher: Tensor, k: int
) -> tuple[Tensor, Tensor | None]:
    """The tokens that IW-OPD compares, and which exist. An id of both models exists once."""
    models = {FORWARD: (teacher,), REVERSE: (student,)}.get(divergence, (teacher, student))
    ids = torch.cat([logits.topk(k).indices for logits in models], -1)
    if len(models) == 1:
        return ids, None
    # Equal ids are neighbours then, which needs no [..., K, K] tensor.
    ordered, places = ids.sort(dim=-1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ids, torch.empty_like(again).scatter_(-1, places, ~again)
