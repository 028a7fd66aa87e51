"""NeMo-RL's distillation from a teacher's K likeliest words: ``DistillationLossFn`` and what
prepares its input, of its main branch of August 2026.

p = softmax of the student, q of the teacher's K logits: of those alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from klfast.api import reduce
from klfast.checks.arguments import check_choice, check_number
from klfast.compat.counts import count_of_tokens
from klfast.compat.divergences import (
    FORWARD,
    REVERSE,
    Divergence,
    check_k_words,
    check_per_token,
    distill,
)
from klfast.dtypes import wide
from klfast.logits.api import token_logprobs
from klfast.logits.entries import divergence_of_entries

KL_TYPES = ("forward", "reverse", "mixed")
LOG_INFINITESIMAL = -100.0
"""The teacher's log-prob of a word beside its K, under ``zero_outside_topk``."""


def distillation_loss(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    token_mask: Tensor | None = None,
    sample_mask: Tensor | None = None,
    *,
    kl_type: str = "mixed",
    mixed_kl_weight: float = 0.5,
    zero_outside_topk: bool = False,
    global_valid_toks: float | Tensor | None = None,
) -> Tensor:
    """The loss of ``DistillationLossFn``, 0-dim, in nats: the mean over kept tokens.

    ======= ===================== =================================================================
    kl_type ``zero_outside_topk`` per token
    ======= ===================== =================================================================
    forward False                 KL(q || p_K), p_K being p of the K words made a distribution
    reverse False                 KL(p_K || q)
    forward True                  sum over the K words of q log(q / p), at least 0
    reverse True                  KL(p || q), with log q = -100 at all other words
    mixed   either                ``mixed_kl_weight`` times forward, and the rest of 1 times reverse
    ======= ===================== =================================================================

    With ``zero_outside_topk`` one read of the vocabulary has the log-probs of the K words and, for
    the reverse KL, the entropy; without it the vocabulary is not read.

    Args:
        student_logits: [B, T, V]; those at t are of token t + 1, so the last are of none.
        teacher_topk_logits: [B, T, K], or log-probs, which are logits as well; at the positions of
            the student's. Gradients reach them if they require it.
        teacher_topk_indices: [B, T, K], which words those are.
        token_mask: [B, T], 0 where token t does not exist: the logits before it, at t - 1, have no
            effect then, whatever they hold. The first token has none before it.
        sample_mask: [B] of zeros and ones, or None.
        kl_type: see above, like the next two.
        mixed_kl_weight: between 0 and 1.
        zero_outside_topk: see there.
        global_valid_toks: the number of tokens to divide by, where it is not the local one; see
            :func:`klfast.compat.nemo_rl.kl_loss`.

    Differs from NeMo-RL: every digit is right near 0; NaN under the mask stays there; nothing is
    added to the denominator (1e-8 there); fp64 stays fp64. A vocabulary in shards is not served.
    As there, one word without ``zero_outside_topk`` gives 0 whatever the models say.

    Raises:
        ValueError: a wrong shape, choice or number.
    """
    check_choice("kl_type", kl_type, KL_TYPES)
    weight = _forward_weight(kl_type, mixed_kl_weight)
    if student_logits.dim() != 3:
        raise ValueError(f"student_logits must be [B, T, V], got {list(student_logits.shape)}")
    check_k_words(
        "student_logits",
        student_logits,
        teacher_topk_logits=teacher_topk_logits,
        teacher_topk_indices=teacher_topk_indices,
    )
    mask = _mask_of_logits(student_logits, token_mask, sample_mask)
    ids = torch.where((mask != 0).unsqueeze(-1), teacher_topk_indices, 0)
    of_type = _of_all_words if zero_outside_topk else _of_few_words
    values = of_type(student_logits, teacher_topk_logits, ids, mask != 0, weight)
    if global_valid_toks is not None:
        global_valid_toks = count_of_tokens("global_valid_toks", global_valid_toks)
    return reduce(values, mask, reduction="token-mean", normalizer=global_valid_toks)


def _forward_weight(kl_type: str, mixed_kl_weight: float) -> float:
    if mixed_kl_weight > 1:
        raise ValueError(f"mixed_kl_weight must be between 0 and 1, got {mixed_kl_weight!r}")
    mixed = check_number("mixed_kl_weight", mixed_kl_weight, least=0)
    return {"forward": 1.0, "reverse": 0.0}.get(kl_type, mixed)


def _mask_of_logits(
    logits: Tensor, token_mask: Tensor | None, sample_mask: Tensor | None
) -> Tensor:
    """[B, T], by the positions of the logits, of masks by tokens."""
    mask = logits.new_ones(logits.shape[:-1], dtype=torch.float32)
    if token_mask is not None:
        check_per_token("token_mask", token_mask, "student_logits", logits)
        mask = token_mask.to(mask.dtype)
    if sample_mask is not None:
        mask = mask * sample_mask.unsqueeze(-1)
    return torch.nn.functional.pad(mask[:, 1:], (0, 1))


def _of_few_words(
    student: Tensor, teacher: Tensor, ids: Tensor, keep: Tensor, weight: float
) -> Tensor:
    """[B, T] of both models as distributions over the K words."""
    words = student.gather(-1, ids)
    return _weighted(lambda divergence: distill(divergence, words, teacher, keep), weight)


def _of_all_words(
    student: Tensor, teacher: Tensor, ids: Tensor, keep: Tensor, weight: float
) -> Tensor:
    """[B, T] of the student over its vocabulary; the teacher has ``LOG_INFINITESIMAL`` elsewhere.

    Reverse, with the sums over the K words: sum p log(p / q) - entropy - sum p log p + 100 (1 - P).
    """
    logprobs, entropy = token_logprobs(student, ids, keep, return_entropy=True)
    log_p = wide(logprobs)
    log_q = wide(torch.where(keep.unsqueeze(-1), teacher, 0.0)).log_softmax(-1)
    exist = keep.unsqueeze(-1).expand(ids.shape)

    def divergence_of(divergence: Divergence) -> Tensor:
        among = divergence_of_entries(log_q, log_p, exist, divergence.direction, "drop", 0.5)
        if divergence == FORWARD:
            return among
        terms = log_p.exp() * torch.where(log_p == -torch.inf, 0.0, log_p)
        elsewhere = 1 - log_p.exp().sum(-1)
        return among - entropy - terms.sum(-1) - LOG_INFINITESIMAL * elsewhere

    return _weighted(divergence_of, weight).to(logprobs.dtype)


def _weighted(divergence_of: Callable[[Divergence], Tensor], weight: float) -> Tensor:
    """``weight`` times forward, the rest of 1 times reverse; one of weight 0 is not computed."""
    parts = [(weight, FORWARD), (1 - weight, REVERSE)]
    values = [factor * divergence_of(divergence) for factor, divergence in parts if factor]
    return torch.stack(values).sum(0)
