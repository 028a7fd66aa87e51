"""ROLL: the KL and the log-probs of ``roll.utils.functionals``, ``roll.utils.kl_controller``, and
the distillation losses of ``roll.pipeline.distill``.

ROLL is installed from source; its tags v0.1.0 to v0.3.0 and its main branch have the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from klfast.args.checks import check_choice
from klfast.args.values import are_tracing
from klfast.compat import common
from klfast.compat.common import IGNORED, check_shapes
from klfast.compat.controllers import FixedKLController
from klfast.compat.controllers import TokenAdaptiveKLController as AdaptiveKLController
from klfast.compat.divergences import FORWARD, REVERSE, Interpolation, distill, per_token_or_full
from klfast.compat.patching.on_import import hook_of_workers
from klfast.compat.presets import ROLL
from klfast.types.names import ReductionName

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "VariousDivergence",
    "compute_approx_kl",
    "entropy_from_logits",
    "get_kl_controller",
    "log_probs_from_logits",
    "op_compute_various_divergence",
    "setup_worker",
]

setup_worker = hook_of_workers("roll")


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    action_mask: Tensor | None = None,
    kl_penalty: str = "kl",
    *,
    exact: bool = False,
) -> Tensor:
    """ROLL's per-token KL, in nats, of the shape of ``log_probs``, 0 where masked.

    ``kl_penalty`` is ``kl``, ``abs``, ``mse``, ``k3`` (limited to 10; see ``presets.ROLL``) or
    ``full``. ``full`` takes log-probs [..., V] of the whole vocabulary and gives the exact
    KL(policy || reference), [...], by one read (see ``divergences.full_kl``).

    Like ROLL's, the gradient of k3 is 0 once x < -2.61, but below -88 too, where theirs is NaN.

    Raises:
        ValueError: ``kl_penalty`` is unknown. With ``full``, the tensors have no vocabulary
            dimension, or the mask does not have the shape [...] (ROLL then sums over the wrong
            dimension).
    """
    return per_token_or_full(log_probs, log_probs_base, kl_penalty, ROLL, action_mask, exact=exact)


def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs of the labels [...] under softmax(logits), [..., V] -> [...], fp32, in nats."""
    return common.token_logprobs(logits, labels)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropies of softmax(logits), [..., V] -> [...], fp32, in nats."""
    return common.entropy(logits)


def get_kl_controller(
    init_kl_coef: float, target_kl: float | None = None, kl_horizon: float | None = None
) -> AdaptiveKLController | FixedKLController:
    """Fixed if ``target_kl`` is None, else adaptive; the horizon is 10,000 if None.

    ``target_kl`` is in nats per token.

    Raises:
        TypeError, ValueError: as the controllers.
    """
    if target_kl is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(
        init_kl_coef, target_kl, 10_000 if kl_horizon is None else kl_horizon
    )


# Distillation. The student has p = softmax(logits / kd_temperature). q are the teacher's
# probabilities, and ROLL has already divided their logits by that temperature (and by the teacher's
# own). p and q are over a whole vocabulary, or are made distributions over the teacher's K most
# likely tokens.


OBJECTIVES = {
    "forward_kl": FORWARD,
    "reverse_kl": REVERSE,
    "js_divergence": Interpolation("jsd", 0.5),
}
"""``kd_objective`` -> the divergence. Those that no read of klfast computes are ``adaptive_kl``,
``skewed_forward_kl`` and ``skewed_reverse_kl``."""

REDUCTIONS: dict[str, ReductionName] = {
    "mean": "token-mean",
    "sum": "token-sum",
    "none": "none",
}
_OWN_NAMES: dict[str, str] = {ours: rolls for rolls, ours in REDUCTIONS.items()}


def _method(objective: str | None = None) -> Callable[..., Tensor]:
    """ROLL's method of one objective, whatever the object's own is; None for the object's own."""

    def compute(
        self: Any,
        logits: Tensor,
        teacher_probs: Tensor | None,
        teacher_log_probs: Tensor,
        teacher_inf_mask: Tensor | None = None,
    ) -> Tensor:
        divergence = OBJECTIVES[objective or self.kd_objective]
        return _divergence(
            divergence, self.kd_temperature, logits, teacher_log_probs, teacher_inf_mask
        )

    compute.__doc__ = f"The divergence of every token by ``{objective or 'kd_objective'}``."
    return compute


class VariousDivergence:
    """Divergences of every token, [..., V] -> [...], fp32, in nats, called as ROLL's own.

    ========================= ====================================================
    ``kd_objective``          per token
    ========================= ====================================================
    ``forward_kl``            KL(q || p)
    ``reverse_kl``            KL(p || q)
    ``js_divergence``         (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2
    ========================= ====================================================

    Both are read once (twice for ``js_divergence``). If ``kd_temperature`` is not 1, a copy of the
    teacher's log-probs times it is made. No gradient reaches the teacher, in ROLL either.

    The sum leaves out ids that ``teacher_inf_mask`` excludes (log-probs of -inf, such as a padded
    vocabulary), as in ROLL. p is still normalized over all ids, so that ``reverse_kl`` is finite
    and can be negative. A token without any other id is 0. If there are such ids, the logits are
    copied, and all objectives but ``forward_kl`` take a second divergence. The check for such ids
    costs a GPU one sync.

    Differs from ROLL: ``js_divergence`` does without the 1e-9 that ROLL adds to probabilities in
    its logarithms. With excluded ids klfast returns the gradient of the value. ROLL's gradient of
    ``reverse_kl`` is NaN then, and so is every objective's if all ids are excluded. The teacher is
    ``teacher_log_probs`` alone, which klfast makes a distribution. ROLL leaves out excluded ids
    also without the mask, and ids that the student alone excludes (a logit of -inf). klfast has
    their value. It is 0 but for ``js_divergence``, for ``reverse_kl`` of ids that the teacher
    excludes, and for ``forward_kl`` of ids that the student excludes. The last two are infinite.

    Args:
        pipeline_config: with ROLL's ``kd_objective`` and ``kd_temperature``.
        padding_id: kept, as in ROLL.

    Raises:
        ValueError: a ``kd_objective`` that klfast does not compute; the message lists those it
            does.
    """

    def __init__(self, pipeline_config: Any, padding_id: int = IGNORED) -> None:
        self.kd_temperature = pipeline_config.kd_temperature
        self.kd_objective = pipeline_config.kd_objective
        self.padding_id = padding_id
        self.args = pipeline_config
        check_choice("kd_objective", self.kd_objective, tuple(OBJECTIVES))

    __call__ = _method()
    compute_forward_kl_divergence = _method("forward_kl")
    compute_reverse_kl_divergence = _method("reverse_kl")
    compute_js_divergence = _method("js_divergence")


def op_compute_various_divergence(
    loss_callable: VariousDivergence,
    logits: Tensor,
    teacher_topk_probs: Tensor | None,
    teacher_topk_log_probs: Tensor,
    teacher_topk_indices: Tensor | None,
    teacher_topk_inf_mask: Tensor | None,
    labels: Tensor | None,
    attention_mask: Tensor | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """The strategies' method of that name as a function: (loss in nats, number of tokens), fp32.

    One read computes divergence, mask and sum, and makes the gradient too, unless the teacher
    excludes ids (see :class:`VariousDivergence`). Rows of tokens that do not exist are not read.
    The logits must be whole, not in shards of the vocabulary or the sequence.

    Args:
        loss_callable: klfast's :class:`VariousDivergence`.
        logits: [B, T, V], of the student.
        teacher_topk_probs: not read.
        teacher_topk_log_probs: [B, T, V], or [B, T, K] for the teacher's most likely ids.
        teacher_topk_indices: [B, T, K], the token ids. None means a whole vocabulary.
        teacher_topk_inf_mask: of their shape, True at the ids that the teacher excludes, or None.
        labels: [B, T], -100 where the token does not exist.
        attention_mask: [B, T], 0 where it does not exist, where ``labels`` is None.
        reduction: ``"mean"`` over tokens (0 of none), their ``"sum"``, or ``"none"``: [B, T],
            unmasked as in ROLL.

    Raises:
        TypeError, ValueError: another ``loss_callable`` or ``reduction``, a wrong shape, or neither
            labels nor mask.
    """
    if not isinstance(loss_callable, VariousDivergence):
        raise TypeError(
            "loss_callable must be a klfast.compat.roll.VariousDivergence, got "
            f"{type(loss_callable).__name__}"
        )
    check_choice("reduction", reduction, REDUCTIONS, others=_OWN_NAMES)
    if labels is not None:
        check_shapes(("logits", logits, "... V"), ("labels", labels, "..."))
        mask = labels != IGNORED
    elif attention_mask is not None:
        check_shapes(("logits", logits, "... V"), ("attention_mask", attention_mask, "..."))
        mask = attention_mask != 0
    else:
        raise ValueError("labels or attention_mask must be given, got neither")
    if teacher_topk_indices is not None:
        indices = teacher_topk_indices.long()
        if reduction != "none":  # indices of padding need not be valid ids
            indices = torch.where(mask.unsqueeze(-1), indices, 0)
        logits = logits.gather(-1, indices)
    loss = _divergence(
        OBJECTIVES[loss_callable.kd_objective],
        loss_callable.kd_temperature,
        logits,
        teacher_topk_log_probs,
        teacher_topk_inf_mask,
        None if reduction == "none" else mask,
        reduction=REDUCTIONS[reduction],
    )
    return loss, mask.sum().float()


def _divergence(
    divergence: Interpolation,
    temperature: float,
    logits: Tensor,
    teacher_log_probs: Tensor,
    excluded: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    reduction: ReductionName = "none",
) -> Tensor:
    """``distill`` with log-probs of the teacher, which have been over the temperature already."""
    check_shapes(
        ("logits", logits, "... V"),
        ("teacher_log_probs", teacher_log_probs, "... V"),
        ("teacher_inf_mask", excluded, "... V"),
    )
    teacher = teacher_log_probs.detach()
    if temperature != 1:
        # ROLL has divided the teacher by the temperature, and ``distill`` divides both models.
        teacher = teacher.to(torch.promote_types(teacher.dtype, torch.float32)) * temperature
    if excluded is not None and (are_tracing() or excluded.any()):
        return _of_kept_ids(divergence, temperature, logits, teacher, excluded, mask, reduction)
    return distill(divergence, logits, teacher, mask, temperature=temperature, reduction=reduction)


def _of_kept_ids(
    divergence: Interpolation,
    temperature: float,
    logits: Tensor,
    teacher: Tensor,
    excluded: Tensor,
    mask: Tensor | None,
    reduction: str,
) -> Tensor:
    """The divergence's terms at the K ids that the teacher keeps, summed; q is 0 elsewhere.

    With P what p has at K, and p_K = p / P there:

    ======= ==================================================
    reverse ``sum over K of p log(p / q) = P (KL(p_K || q) + log P)``
    jsd     ``jsd(p, q) - (1 - P) log(2) / 2``
    forward ``KL(q || p)``
    ======= ==================================================

    ``log P = -KL(p_K || p)``, which has its digits near P = 1 and near P = 0.
    """
    within = logits.masked_fill(excluded, -math.inf)
    # A row of -inf alone has no distribution: its token is left out.
    any_word = ~within.isneginf().all(-1)
    each = partial(
        distill, mask=any_word if mask is None else any_word & mask, temperature=temperature
    )
    if divergence == FORWARD:
        terms = each(FORWARD, logits, teacher)
    else:
        log_mass = -each(REVERSE, within, logits)
        if divergence == REVERSE:
            terms = log_mass.exp() * (each(REVERSE, within, teacher) + log_mass)
        else:
            terms = each(divergence, logits, teacher) + log_mass.expm1() * (math.log(2) / 2)
    if reduction == "none":
        return terms
    total = terms.sum()
    if reduction == "token-sum":
        return total
    number = terms.numel() if mask is None else mask.sum()
    return total / torch.as_tensor(number).clamp(min=1)
