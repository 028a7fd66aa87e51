"""klfast's KL inside TRL's own trainers: the mixin, and what ``patch("trl")`` puts in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from klfast.compat import trl_losses
from klfast.compat.common import per_token
from klfast.compat.patching.fingerprints import PatchError, fingerprint
from klfast.compat.patching.sites import versioned
from klfast.compat.presets import TRL_RLOO
from klfast.compat.trl_recording import recorded
from klfast.stats import KLStats

COMPUTE_LOSS = "c41fd27d9e7b8cd9"
"""Fingerprint of the one ``GRPOTrainer._compute_loss`` of these releases."""

RELEASES = "1.10 to 1.16"

ORIGINAL = "_klfast_original"
"""Where ``patch`` keeps TRL's ``_compute_loss``, for a mixin that meets klfast's."""


class GRPOMixin:
    """``class Trainer(GRPOMixin, trl.GRPOTrainer): pass``: the KL of the loss is klfast's.

    The value, gradient and metric ``kl`` are TRL's, by one fused read (``trl_losses.kl_loss``). One
    number differs: where the longest completion has one token, TRL's metric also counts the masked
    ones. NaN and inf in the reference's log-probs stay under the mask.

    ``log_kl_stats = True`` in the class logs all of the KL's statistics too, as ``kl/k1``,
    ``kl/max_abs_log_ratio`` and so on (``KLStats.as_dict``), of the completions of all ranks; like
    TRL's own metrics they are means over the batches since the last log. It costs one more gather
    and one more transfer a batch.

    Raises:
        PatchError: when the class is made, if the ``_compute_loss`` after the mixin is not the one
            that klfast knows, of TRL 1.10 to 1.16.
    """

    log_kl_stats = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        behind = cls.__mro__[cls.__mro__.index(GRPOMixin) + 1 :]
        owner = next((base for base in behind if "_compute_loss" in vars(base)), None)
        if owner is None:
            raise PatchError(
                f"{cls.__name__} must derive from GRPOMixin first and TRL's GRPOTrainer after it, "
                "got no _compute_loss after it"
            )
        function = vars(owner)["_compute_loss"]
        if fingerprint(getattr(function, ORIGINAL, function)) != COMPUTE_LOSS:
            raise PatchError(
                f"{cls.__name__} must derive from GRPOMixin and the GRPOTrainer that klfast knows, "
                f"got {owner.__name__}'s _compute_loss; with {versioned('trl')} this code "
                f"is not known to klfast, which knows trl {RELEASES}"
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return _loss(self, super()._compute_loss, model, inputs)  # type: ignore[misc]  # TRL's


def _loss(
    trainer: Any, compute_loss: Callable[..., Tensor], model: Any, inputs: dict[str, Any]
) -> Tensor:
    """TRL's loss without a KL, plus klfast's KL of the log-probs that TRL computed for it."""
    if trainer.beta == 0.0:
        return compute_loss(model, inputs)
    beta, mode = trainer.beta, "train" if trainer.model.training else "eval"
    with _without_kl(trainer) as forwards:
        loss = compute_loss(model, inputs)
    if len(forwards) != 1:
        raise RuntimeError(f"_compute_loss must run the model once, got {len(forwards)} times")
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    term, stats = trl_losses.kl_loss(
        forwards[0][0],
        inputs["ref_per_token_logps"],
        mask,
        beta=beta,
        loss_type=trainer.loss_type,
        normalizer=_normalizer(trainer, mask, inputs, mode),
        old_per_token_logps=inputs.get("old_per_token_logps"),
        use_bias_correction_kl=trainer.args.use_bias_correction_kl,
        importance_sampling_level=trainer.importance_sampling_level,
    )
    _log(trainer, mode, term.detach(), stats.kl.sum(), stats.length.sum())
    if getattr(trainer, "log_kl_stats", False):
        _log_stats(trainer, mode, stats)
    return loss + term / _accumulation(trainer, mode)


@contextmanager
def _without_kl(trainer: Any) -> Iterator[list[Any]]:
    """A trainer that penalises nothing; what its forwards return goes into the list."""
    beta = trainer.beta
    trainer.beta = 0.0
    try:
        with recorded(trainer, "_get_per_token_logps_and_entropies") as forwards:
            yield forwards
    finally:
        trainer.beta = beta


def _normalizer(trainer: Any, mask: Tensor, inputs: dict[str, Any], mode: str) -> Any:
    """TRL's denominator for the loss types that have one."""
    if trainer.loss_type not in trl_losses.NEED_NORMALIZER:
        return None
    if trainer.loss_type == "dr_grpo":
        return mask.shape[0] * trainer.max_completion_length
    tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if mode == "train":  # the count is of a whole generation batch
        tokens = tokens * trainer.current_gradient_accumulation_steps
        tokens = tokens / trainer.args.steps_per_generation
    return tokens


def _accumulation(trainer: Any, mode: str) -> float:
    """The number TRL divides its loss by; a global token count holds it already."""
    if mode == "eval" or trainer.loss_type in trl_losses.GLOBAL_COUNT:
        return 1.0
    return float(trainer.current_gradient_accumulation_steps)


def _log(trainer: Any, mode: str, term: Tensor, kl: Tensor, tokens: Tensor) -> None:
    """TRL's metrics that know of the KL: ``kl``, a mean over ranks, and ``policy_loss``."""
    metrics = trainer._metrics[mode]
    totals = trainer.accelerator.reduce(torch.stack([kl, tokens]), reduction="sum")
    metrics["kl"].append((totals[0] / totals[1].clamp(min=1.0)).item())
    if trainer._entropy_bonus_enabled:  # TRL logs it then alone, KL included
        metrics["policy_loss"][-1] += trainer.accelerator.gather(term).nanmean().item()


def _log_stats(trainer: Any, mode: str, stats: KLStats) -> None:
    """The statistics of all ranks' sequences under ``kl/...``; one gather, one transfer."""
    accelerator, metrics = trainer.accelerator, trainer._metrics[mode]
    rows = torch.stack([*stats, torch.ones_like(stats.kl)], 1)  # [B, 9], the last: it is a sequence
    rows = accelerator.gather(accelerator.pad_across_processes(rows, dim=0))
    *fields, is_sequence = rows.unbind(1)
    numbers = KLStats(*(field[is_sequence > 0] for field in fields)).as_dict("kl/")
    for name, number in zip(numbers, torch.stack([*numbers.values()]).tolist(), strict=True):
        metrics[name].append(number)


def with_fused_kl(original: Any, exact: bool) -> Any:
    """``GRPOTrainer._compute_loss`` with klfast's KL."""

    @functools.wraps(original)
    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        return _loss(self, functools.partial(original, self), model, inputs)

    setattr(_compute_loss, ORIGINAL, original)
    return _compute_loss


class RLOO:
    """The functions that the rewritten statements of ``RLOOTrainer`` call."""

    sequence_kl = staticmethod(trl_losses.sequence_kl)

    @staticmethod
    def per_token_k1(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """Policy - reference, 0 where masked."""
        return per_token(logps, ref_logps, TRL_RLOO, mask)


def kl_penalty_of_ppo(
    self: Any, logprob: Tensor, ref_logprob: Tensor, *, exact: bool = False
) -> Tensor:
    """``PPOTrainer._kl_penalty`` of TRL up to 0.11."""
    return trl_losses.kl_penalty(logprob, ref_logprob, self.config.kl_penalty, exact=exact)
