"""verl 0.6 to 0.9 and main: ``verl.trainer.ppo.core_algos``, ``apply_kl_penalty``, from logits
``verl.utils.torch_functional``, distillation, and the rollout correction (see ``verl_rollout``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from klfast.args.checks import check_choice, check_number
from klfast.args.estimator import Estimator
from klfast.compat import common
from klfast.compat.common import check_shapes, choose, per_token
from klfast.compat.controllers import VERL_RULES
from klfast.compat.controllers import VerlAdaptiveKLController as AdaptiveKLController
from klfast.compat.controllers import VerlFixedKLController as FixedKLController
from klfast.compat.patching.on_import import hook_of_workers
from klfast.compat.presets import VERL
from klfast.compat.verl_rollout import (
    ROLLOUT_RULES,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from klfast.controllers.base import CoefficientController
from klfast.formulas.divergences import DIRECTION_TABLE
from klfast.formulas.topk import divergence_of_entries
from klfast.functional.logits import token_logprobs
from klfast.functional.penalty import kl_penalty as fused_kl_penalty
from klfast.functional.penalty import reduce
from klfast.types.dtypes import wide
from klfast.types.names import ReductionName
from klfast.types.reduction import TORCHS_REDUCTIONS

__all__ = [
    "ROLLOUT_RULES",
    "AdaptiveKLController",
    "FixedKLController",
    "agg_loss",
    "apply_kl_penalty",
    "compute_forward_kl_topk",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "get_kl_controller",
    "kl_loss",
    "kl_penalty",
    "logprobs_from_logits",
    "setup_worker",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_from_logits",
]


setup_worker = hook_of_workers("verl")

REDUCTIONS: dict[str, ReductionName] = {
    "token-mean": "token-mean",
    "token-sum": "token-sum",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-norm": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
}
"""``loss_agg_mode`` -> klfast's reduction."""


def kl_penalty(
    logprob: Tensor, ref_logprob: Tensor, kl_penalty: str, *, exact: bool = False
) -> Tensor:
    """The per-token KL of verl, in nats, of the shape of ``logprob``; there is no mask here.

    ``kl_penalty`` is ``kl`` or ``k1``, ``abs``, ``mse`` or ``k2``, ``low_var_kl`` or ``k3`` (see
    ``presets.VERL``). With a ``+``, the gradient is k2's. ``full`` raises NotImplementedError, as
    in verl.

    The value with a ``+`` at an infinite log-ratio is not NaN, as it is in verl. Like verl's, the
    gradient of k3 is 0 once ``logprob - ref_logprob < -2.61``.
    """
    return per_token(logprob, ref_logprob, _estimator(kl_penalty), exact=exact)


def _estimator(mode: str) -> Estimator:
    if mode == "full":
        raise NotImplementedError(
            "kl_penalty 'full' needs log-probs of the whole vocabulary, which verl does not pass"
        )
    return choose("kl_penalty", mode, VERL)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """The scalar that verl makes of a per-token loss [B, T] under a mask [B, T], in its unit.

    ``token-mean``, ``token-sum``, ``seq-mean-token-sum``, ``seq-mean-token-sum-norm`` (divided by
    ``loss_scale_factor``, T by default) or ``seq-mean-token-mean``, times ``dp_size``. Sequences
    without a kept token are left out.

    ``batch_num_tokens`` (of ``token-mean``) and ``global_batch_size`` (of the sequence modes)
    replace this rank's own counts in the denominator. They are the counts of all data-parallel
    ranks, *not* divided by the number of ranks: ``dp_size``, that number, is the factor which makes
    up for DDP and FSDP averaging gradients. (``klfast.kl_penalty`` has no such factor: there the
    ``normalizer`` is divided.) ``token-sum`` has no denominator.

    Differs from verl: the mean over no local tokens is 0, not NaN, and a count that is given must
    be > 0.

    Raises:
        ValueError: an unknown ``loss_agg_mode``; a count that is <= 0, or is missing where
            ``dp_size`` > 1.
    """
    counts = dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
    options = _aggregation(loss_mask, loss_agg_mode, *counts)
    return reduce(loss_mat, loss_mask, **options)


def kl_loss(
    logprob: Tensor,
    ref_logprob: Tensor,
    kl_penalty: str,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """``agg_loss(kl_penalty(...), ...)``, 0-dim, in nats, by one read; arguments as there."""
    counts = dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
    options = _aggregation(loss_mask, loss_agg_mode, *counts)
    loss: Tensor = fused_kl_penalty(
        logprob, ref_logprob, loss_mask, estimator=_estimator(kl_penalty), **options
    )
    return loss


def _aggregation(
    mask: Tensor,
    mode: str,
    dp_size: int,
    batch_num_tokens: float | Tensor | None,
    global_batch_size: float | Tensor | None,
    loss_scale_factor: float | None,
) -> dict[str, Any]:
    """Klfast's ``reduction``, ``normalizer`` and ``coef`` for the arguments of ``agg_loss``."""
    check_choice("loss_agg_mode", mode, tuple(REDUCTIONS), torchs=TORCHS_REDUCTIONS)
    coef, count, name = float(dp_size), global_batch_size, "global_batch_size"
    if mode == "token-mean":
        count, name = batch_num_tokens, "batch_num_tokens"
    if mode == "token-sum":
        count = None
    # This rank's own count times dp_size would be no mean over all ranks.
    elif count is None and dp_size > 1:
        raise ValueError(f"{name} must be given when dp_size > 1, got None")
    elif count is not None and not isinstance(count, Tensor):
        count = check_number(name, count, above=0)
    if mode == "seq-mean-token-sum-norm":
        scale = max(1, mask.shape[-1]) if loss_scale_factor is None else loss_scale_factor
        # The sum over a sequence is divided by this in place of its length.
        coef /= check_number("loss_scale_factor", scale, above=0)
    return {"reduction": REDUCTIONS[mode], "normalizer": count, "coef": coef}


@torch.no_grad()
def apply_kl_penalty(data: Any, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[Any, dict[str, Any]]:
    """The KL in verl's reward: ``token_level_rewards = token_level_scores - beta * kl * mask``.

    It reads ``old_log_probs``, ``ref_log_prob``, ``response_mask`` and ``token_level_scores`` of
    ``data.batch`` ([B, T] each) and writes ``token_level_rewards``. It updates ``kl_ctrl`` with the
    mean over all B sequences of their mean KL per token (0 for a fully masked one, as in verl) and
    ``n_steps=B``.

    Returns:
        ``(data, {"actor/reward_kl_penalty": ..., "actor/reward_kl_penalty_coeff": ...})``, nats per
        token and the coefficient used.
    """
    batch = data.batch
    # Read before the update, as verl does.
    beta = kl_ctrl.value
    penalty, stats = fused_kl_penalty(
        batch["old_log_probs"],
        batch["ref_log_prob"],
        batch["response_mask"],
        estimator=_estimator(kl_penalty),
        coef=beta,
        return_stats=True,
    )
    batch["token_level_rewards"] = batch["token_level_scores"] - penalty
    # A masked sequence counts as 0 in the mean, because verl's does.
    current_kl = torch.where(stats.length > 0, stats.kl / stats.length, 0.0).mean().item()
    kl_ctrl.update(current_kl=current_kl, n_steps=batch.batch_size[0])
    metrics = {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
    return data, metrics


def logprobs_from_logits(
    logits: Tensor, labels: Tensor, inplace_backward: bool = True, *, exact: bool = False
) -> Tensor:
    """Log-probs of the labels [...] under softmax(logits), [..., V] -> [...], in nats, by one read.

    A label of -100 gives 0 and no gradient, as in verl with flash-attn; without it verl fails.
    SkyRL's function is the same.

    With ``inplace_backward`` the backward writes the gradient into the memory of the logits, as
    flash-attn does. If the logits are a leaf or not contiguous, or under ``torch.compile``, it
    takes new memory instead, with the same gradient. If another op has saved the logits for a
    backward that comes later, autograd raises (flash-attn's gradient is wrong there). Pass False
    then, as verl does for its entropies. ``exact=True`` gives verl's dtype without flash-attn.
    """
    return common.token_logprobs(
        logits,
        labels,
        ignore_index=common.IGNORED,
        inplace_backward=inplace_backward,
        exact=exact,
    )


def entropy_from_logits(logits: Tensor, *, exact: bool = False) -> Tensor:
    """Entropies of softmax(logits), [..., V] -> [...], in nats."""
    return common.entropy(logits, exact=exact)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """The same in fp32, in nats, [N, V] -> [N]."""
    return common.entropy(logits)


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs of the labels [...] of logits [..., V / ranks], in nats, on every rank.

    Megatron's tensor parallelism defines the ranks. Differs from verl: the logits are not changed,
    where Megatron's cross entropy overwrites fp32 logits. There is one all-gather, where Megatron
    makes three all-reduces. A label outside the vocabulary is a ValueError on a CPU and NaN on a
    GPU.
    """
    return token_logprobs(logits, labels, group=common.tensor_parallel_group())


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """Entropies of softmax(logits), [..., V / ranks] -> [...], in nats, on every rank.

    The backward writes into nothing but its gradient, where verl's changes the logits for a while.
    """
    return common.entropy(vocab_parallel_logits, group=common.tensor_parallel_group())


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor, chunk_size: int = 2048
) -> Tensor:
    """The same in nats, [N, V / ranks] -> [N]."""
    return vocab_parallel_entropy(vocab_parallel_logits)


def get_kl_controller(kl_ctrl: Any) -> CoefficientController:
    """The controller of verl's config: ``type``, ``kl_coef``, ``target_kl``, ``horizon``.

    ``type`` is verl's ``"fixed"`` or ``"adaptive"``, or another name in
    ``klfast.controllers.CONTROLLERS``. The config may also have a mapping ``options``, which goes
    to the controller (``{"kp": 0.1}``). Only ``"adaptive"`` uses ``horizon``.
    ``target_kl`` is in nats per token, as verl measures it; None makes ``"scheduled"`` a schedule
    of the coefficient.

    Raises:
        ValueError: ``type`` is unknown, or a number is out of range.
        TypeError: the controller has no such option, or ``options`` is no mapping.
    """
    check_choice("kl_ctrl.type", kl_ctrl.type, ("fixed", "adaptive", *VERL_RULES))
    given = getattr(kl_ctrl, "options", None) or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"kl_ctrl.options must be a mapping, got {type(given).__name__}")
    options = dict(given)
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef, **options)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon, **options)
    make: Any = VERL_RULES[kl_ctrl.type]
    controller: CoefficientController = make(
        kl_ctrl.kl_coef, kl_ctrl.target_kl, **{"unit": "token", **options}
    )
    return controller


def compute_forward_kl_topk(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    """The truncated forward KL of every token, in nats, and verl's metrics for it, [1, N] each.

    The KL is ``sum over the teacher's K token ids of q log(q / p)``, with
    p = softmax(student_logits) and q the teacher's probabilities. This is
    ``klfast.topk_kl_divergence`` with the tail ``"drop"``, and it is no divergence. It may be
    negative. If the models are equal its gradient is not 0, but moves probability from all other
    ids to the K. verl makes negative values 0 afterwards, in ``verl.trainer.distillation.losses``,
    which ends the gradient of those tokens. This function does not, and ``patch`` leaves verl's
    function as it is. The tail ``"bucket"`` needs no such limit.

    The logits are read once for all results, and once more for their most likely ids. Nothing of
    their size is made but the gradient, with ``use_chunked_topk`` and without.

    Args:
        student_logits: [1, N, V], divided by the temperature, as verl's engines do it.
        teacher_topk_log_probs: nested, [B, length, K], N tokens together; or [1, N, K].
        teacher_topk_ids: of the same shape. A token id may occur twice, and is added twice. With
            Ulysses sequence parallelism this rank's part of both is taken, as in verl.
        config: verl's ``DistillationConfig``. klfast reads its
            ``distillation_loss.log_prob_min_clamp``, the least log-prob of both models, below which
            the student has no gradient. None means no limit.
        data_format: of no use, as in verl.

    Returns:
        A dict of four metrics and the loss. ``distillation_losses`` has the KL. ``student_mass``
        and ``teacher_mass`` are the sums of the probabilities over the K ids. ``overlap_count`` is
        the number of these ids among the student's K most likely. ``overlap_token_advantage`` is
        the mean of ``-q log(q / p)`` over the ids that overlap.

    Differs from verl: only the first result has a gradient, as with Megatron. A log-prob of -inf
    adds 0 without a clamp. If token ids are equally likely to the student, ``overlap_count`` may
    count others.

    Raises:
        ValueError: log-probs or ids do not have the shape of the logits' tokens, [1, N, K].
    """
    logprobs, ids = (_of_this_rank(each) for each in (teacher_topk_log_probs, teacher_topk_ids))
    check_shapes(
        ("student_logits", student_logits, "... V"),
        ("teacher_topk_log_probs", logprobs, "... K"),
        ("teacher_topk_ids", ids, "... K"),
    )
    # One read of the logits for all K ids.
    picked = token_logprobs(student_logits, ids)
    student, teacher = wide(picked), wide(logprobs)
    masses = {
        f"{name}_mass": of.detach().exp().sum(-1).to(picked.dtype)
        for name, of in (("student", student), ("teacher", teacher))
    }
    least = config.distillation_loss.log_prob_min_clamp
    # The masses above are of unclamped log-probs, as in verl.
    if least is not None:
        student, teacher = student.clamp_min(least), teacher.clamp_min(least)
    exist = torch.ones_like(ids, dtype=torch.bool)
    losses = divergence_of_entries(teacher, student, exist, DIRECTION_TABLE["forward"], "drop")
    return {
        "distillation_losses": losses.to(picked.dtype),
        **masses,
        **_overlap(student_logits, ids, teacher, student, picked.dtype),
    }


def _of_this_rank(teacher: Tensor) -> Tensor:
    """The teacher tensor of verl as [1, N, K], of N tokens or of this rank's part of them."""
    packed = teacher.values().unsqueeze(0) if teacher.is_nested else teacher
    # An import would load verl. If it is not loaded, nobody has cut the tokens.
    ulysses: Any = sys.modules.get("verl.utils.ulysses")
    if ulysses is None or ulysses.get_ulysses_sequence_parallel_world_size() == 1:
        return packed
    part: Tensor = ulysses.slice_input_tensor(packed, dim=1)
    return part


@torch.no_grad()
def _overlap(
    logits: Tensor, ids: Tensor, teacher: Tensor, student: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The teacher's ids among the student's K most likely: their number, and verl's mean."""
    likeliest = logits.topk(ids.shape[-1]).indices.sort(-1).values
    ids = ids.to(likeliest.dtype).contiguous()
    # K ids are looked up in K sorted ones, which needs no [N, K, K] tensor.
    at = torch.searchsorted(likeliest, ids).clamp(max=ids.shape[-1] - 1)
    shared = likeliest.gather(-1, at) == ids
    count = shared.sum(-1)
    total = -divergence_of_entries(teacher, student, shared, DIRECTION_TABLE["forward"], "drop")
    advantage = (total / count.clamp(min=1)).to(dtype)
    return {"overlap_count": count, "overlap_token_advantage": advantage}
