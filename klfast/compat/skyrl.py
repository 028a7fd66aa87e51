"""SkyRL: the KL of ``skyrl.backends.skyrl_train.utils.ppo_utils``, its reward and controllers, and
what ``torch_utils`` makes of logits.

Its main branch of August 2026. ``logprobs_from_logits``, which SkyRL has from verl, is verl's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klfast.args.checks import check_choice
from klfast.compat import common
from klfast.compat.common import choose, per_token
from klfast.compat.controllers import FixedKLController
from klfast.compat.controllers import TokenAdaptiveKLController as AdaptiveKLController
from klfast.compat.divergences import FORWARD, check_models, distill
from klfast.compat.patching.on_import import hook_of_workers
from klfast.compat.presets import SKYRL
from klfast.compat.verl import logprobs_from_logits
from klfast.functional.penalty import kl_penalty as fused_kl_penalty
from klfast.functional.penalty import reduce
from klfast.types.dtypes import wide_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "apply_reward_kl_penalty",
    "chunked_entropy_from_logits",
    "compute_approx_kl",
    "draft_soft_ce",
    "draft_soft_ce_topk",
    "get_kl_controller",
    "kl_loss",
    "logprobs_from_logits",
    "setup_worker",
]

setup_worker = hook_of_workers("skyrl")


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    loss_mask: Tensor | None = None,
    kl_estimator_type: str = "k3",
    *,
    exact: bool = False,
) -> Tensor:
    """SkyRL's per-token KL, in nats, of the shape of ``log_probs``, times the mask.

    ``kl_estimator_type`` is ``k1``, ``abs``, ``k2`` or ``k3``. In k3 the log-ratio is limited to 20
    and the value to 10 (see ``presets.SKYRL``).

    The mask has the shape of ``log_probs``. With ``exact=True`` the log-probs and the mask promote
    to the result's dtype. Like SkyRL's, the gradient of k3 is 0 once
    ``log_probs - log_probs_base < -2.61``.
    """
    estimator = choose("kl_estimator_type", kl_estimator_type, SKYRL)
    kl = per_token(log_probs, log_probs_base, estimator, loss_mask)
    if not exact:
        return kl
    # SkyRL multiplies by the mask, whose dtype takes part.
    dtype = torch.promote_types(log_probs.dtype, log_probs_base.dtype)
    return kl.to(dtype if loss_mask is None else torch.promote_types(dtype, loss_mask.dtype))


def kl_loss(
    log_probs: Tensor,
    log_probs_base: Tensor,
    loss_mask: Tensor | None = None,
    kl_estimator_type: str = "k3",
) -> Tensor:
    """The KL term of SkyRL's loss (0-dim, nats) before its coefficient, in one read.

    This is ``masked_mean(compute_approx_kl(...), loss_mask, dim=-1).mean()``. It is the mean over
    all B sequences of their mean over kept tokens, which is 0 for a sequence without any. The
    tensors are [B, T] each. The mask holds zeros and ones (SkyRL multiplies by it twice).
    """
    return fused_kl_penalty(
        log_probs,
        log_probs_base,
        loss_mask,
        estimator=choose("kl_estimator_type", kl_estimator_type, SKYRL),
        reduction="seq-mean-token-mean",
        normalizer=max(1, log_probs.shape[0]),
    )


@torch.no_grad()
def apply_reward_kl_penalty(self: Any, data: Any) -> Any:
    """The KL in SkyRL's reward, as the method of its trainer (``self``) of this name.

    ``rewards -= max(0, coefficient) * kl * mask``, of ``data``'s ``action_log_probs``,
    ``base_action_log_probs``, ``loss_mask`` of zeros and ones and ``rewards``, [B, T] each. The
    coefficient comes from ``self.reward_kl_controller``, which is then updated with the mean over
    sequences of their mean KL per token and ``n_steps=B``. Without a controller the coefficient is
    ``kl_loss_coef`` of ``self.cfg.trainer.algorithm``. ``avg_kl``, ``avg_kl_max`` (the mean of the
    sequences' largest absolute KL; nats per token) and ``kl_loss_coef`` go to
    ``data.metadata["metrics"]`` and, under ``loss/``, to ``self.all_metrics``.
    """
    algorithm, controller = self.cfg.trainer.algorithm, self.reward_kl_controller
    kl, stats = fused_kl_penalty(
        data["action_log_probs"],
        data["base_action_log_probs"],
        data["loss_mask"],
        estimator=choose("kl_estimator_type", algorithm.kl_estimator_type, SKYRL),
        return_stats=True,
    )
    # SkyRL logs the coefficient that the step used, before the controller moves.
    coefficient = algorithm.kl_loss_coef if controller is None else controller.value
    data["rewards"] = data["rewards"] - kl * max(0, coefficient)
    metrics = {
        "avg_kl": (stats.kl / stats.length.clamp(min=1)).mean().item(),
        "avg_kl_max": kl.abs().amax(-1).mean().item(),
        "kl_loss_coef": coefficient,
    }
    if controller is not None:
        controller.update(current=metrics["avg_kl"], n_steps=kl.shape[0])
    data.metadata.setdefault("metrics", {}).update(metrics)
    self.all_metrics.update({f"loss/{name}": value for name, value in metrics.items()})
    return data


def get_kl_controller(algorithm_cfg: Any) -> AdaptiveKLController | FixedKLController:
    """The controller of SkyRL's config: ``kl_loss_coef`` and ``kl_ctrl``'s ``type``, ``kl_target``
    (nats per token) and ``horizon``.

    Raises:
        ValueError: ``type`` is neither ``"fixed"`` nor ``"adaptive"``, or a number is out of range.
    """
    kl_ctrl = algorithm_cfg.kl_ctrl
    check_choice("kl_ctrl.type", kl_ctrl.type, ("fixed", "adaptive"))
    if kl_ctrl.type == "fixed":
        return FixedKLController(algorithm_cfg.kl_loss_coef)
    return AdaptiveKLController(algorithm_cfg.kl_loss_coef, kl_ctrl.kl_target, kl_ctrl.horizon)


def chunked_entropy_from_logits(
    logits: Tensor,
    requires_grad: bool = False,
    attention_mask: Tensor | None = None,
    chunk_size: int = 1024,
    *,
    exact: bool = False,
) -> Tensor:
    """Entropies of softmax(logits), [B, T, V] -> [B, T], in nats.

    A gradient flows if ``requires_grad``. ``attention_mask`` [B, T] holds zeros and ones. At a zero
    the entropy is 0 and the row is not read.
    """
    logits = logits if requires_grad else logits.detach()
    return common.entropy(logits, mask=attention_mask, exact=exact)


# The losses of a draft head, ``skyrl.backends.skyrl_train.mtp.soft_ce``


def draft_soft_ce(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    global_normalization_factor: float | Tensor | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The masked mean of the soft cross-entropy, a 0-dim tensor, in nats.

    The student is a draft head (p), and its teacher is the policy (q). The cross-entropy of a token
    is ``-sum over V of q log p = H(q) + KL(q || p)`` at a temperature of 1. The teacher is read
    twice. Tokens are counted exactly. SkyRL's mask in bf16 is rounded past 256.

    Args:
        student_logits: [B, T, V].
        teacher_logits: [B, T, V], detached; cut both to the ids that exist (a view will do).
        mask: [B, T], which tokens exist, and their weights.
        global_normalization_factor: divides the sum instead of the mask's sum. Below 1 either
            counts as 1. DDP and FSDP average gradients, so divide the number of all ranks by the
            world size, or multiply the loss by the world size.
        vocab_parallel_group: None, or a group of one: klfast does not add up shards here.
        chunk_size: of no use.

    Raises:
        ValueError: a wrong shape, a teacher with a gradient, or a vocabulary in shards.
    """
    _check(student_logits, teacher_logits, mask, vocab_parallel_group)
    count = global_normalization_factor
    if count is None:
        # SkyRL's sum of a bf16 mask stops counting at 256.
        count = mask.sum(dtype=wide_dtype(mask.device))
    normalizer = count.clamp(min=1) if isinstance(count, Tensor) else max(1.0, count)
    divergence = distill(
        FORWARD,
        student_logits,
        teacher_logits,
        mask,
        reduction="token-mean",
        normalizer=normalizer,
    )
    # The cross-entropy is the KL plus the teacher's entropy, which has no gradient.
    entropies = common.entropy(teacher_logits, mask=mask)
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
    """The same in nats over the teacher's ``k`` most likely ids, renormalized in both models.

    ``torch.topk`` finds them, and ``roll_shift`` moves them, [B, T, k], as many tokens to the left.
    :func:`draft_soft_ce` describes the other arguments and errors.
    """
    _check(student_logits, teacher_logits, mask, vocab_parallel_group)
    words, indices = teacher_logits.topk(min(k, teacher_logits.shape[-1]), dim=-1)
    if roll_shift:
        words, indices = (torch.roll(t, -roll_shift, dims=1) for t in (words, indices))
    few = student_logits.gather(-1, indices)
    return draft_soft_ce(few, words, mask, global_normalization_factor)


def _check(student: Tensor, teacher: Tensor, mask: Tensor, group: ProcessGroup | None) -> None:
    check_models(student, teacher, mask=mask)
    if teacher.requires_grad:
        raise ValueError("teacher_logits must be detached, got a tensor that requires a gradient")
    if group is not None and torch.distributed.get_world_size(group) > 1:
        raise ValueError(
            "vocab_parallel_group must be None or a group of one rank, because this loss needs the "
            f"whole vocabulary, got one of {torch.distributed.get_world_size(group)}"
        )
