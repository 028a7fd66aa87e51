"""klfast inside TRL's own trainers: mixins, and what ``patch("trl")`` puts in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from klfast.args.checks import check_choice
from klfast.args.estimator import Estimator, as_estimator
from klfast.compat import trl_losses
from klfast.compat.patching.fingerprints import PatchError, fingerprint
from klfast.compat.patching.replacements import Options
from klfast.compat.patching.sites import versioned
from klfast.compat.presets import TRL_GRPO
from klfast.stats.kl import KLStats
from klfast.types.names import EstimatorName

COMPUTE_LOSS = "c41fd27d9e7b8cd9"
"""Fingerprint of the one ``GRPOTrainer._compute_loss`` of these releases."""

RELEASES = "1.10 to 1.16"

ORIGINAL = "_klfast_original"
"""The attribute that keeps TRL's ``_compute_loss`` after ``patch``, for a mixin over klfast's."""


class GRPOMixin:
    """``class Trainer(GRPOMixin, trl.GRPOTrainer): pass``: the KL of the loss is klfast's.

    The value, gradient and metric ``kl`` are TRL's, by one fused read (``trl.kl_loss``). One
    number differs: where the longest completion has one token, TRL's metric also counts the masked
    ones. NaN and inf in the reference's log-probs stay under the mask.

    ``log_kl_stats = True`` in the class logs all of the KL's statistics too, as ``kl/k1``,
    ``kl/max_abs_log_ratio`` and so on (``KLStats.as_dict``). They cover the completions of all
    ranks and, like TRL's own metrics, are means over the batches since the last log. The option
    costs one more gather and one more transfer per batch.

    ``estimator = "k3+"`` in the class, or any ``klfast.Estimator``, replaces TRL's k3, as
    ``estimator`` of ``trl.kl_loss``.

    Raises:
        PatchError: when the class is made, if the ``_compute_loss`` after the mixin is not the one
            that klfast knows, of TRL 1.10 to 1.16.
    """

    log_kl_stats = False
    estimator: EstimatorName | Estimator = TRL_GRPO

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        as_estimator(cls.estimator)
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
        theirs = super()._compute_loss  # type: ignore[misc]  # TRL's
        return _loss(self, theirs, model, inputs, self.estimator)


@contextmanager
def recorded(owner: Any, name: str) -> Iterator[list[Any]]:
    """Everything that ``owner.name`` returns until the end of the block goes into the list."""
    method, own = getattr(owner, name), name in vars(owner)
    seen: list[Any] = []

    @functools.wraps(method)
    def recording(*args: Any, **kwargs: Any) -> Any:
        returned = method(*args, **kwargs)
        seen.append(returned)
        return returned

    setattr(owner, name, recording)
    try:
        yield seen
    finally:
        if own:
            setattr(owner, name, method)
        else:  # the class's shows again
            delattr(owner, name)


def _loss(
    trainer: Any,
    compute_loss: Callable[..., Tensor],
    model: Any,
    inputs: dict[str, Any],
    estimator: EstimatorName | Estimator,
) -> Tensor:
    """TRL's loss without a KL, plus klfast's KL of the log-probs that TRL computed for it."""
    if trainer.beta == 0.0:
        return compute_loss(model, inputs)
    beta, mode = trainer.beta, "train" if trainer.model.training else "eval"
    # TRL computes the log-probs and adds no KL where beta is 0.
    trainer.beta = 0.0
    try:
        with recorded(trainer, "_get_per_token_logps_and_entropies") as forwards:
            loss = compute_loss(model, inputs)
    finally:
        trainer.beta = beta
    # Several forwards would leave open which log-probs the loss has.
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
        estimator=estimator,
    )
    _log(trainer, mode, term.detach(), stats.kl.sum(), stats.length.sum())
    if getattr(trainer, "log_kl_stats", False):
        _log_stats(trainer, mode, stats)
    # A global token count has the accumulation steps in it already.
    is_whole = mode == "eval" or trainer.loss_type in trl_losses.GLOBAL_COUNT
    return loss + term / (1.0 if is_whole else float(trainer.current_gradient_accumulation_steps))


def _normalizer(trainer: Any, mask: Tensor, inputs: dict[str, Any], mode: str) -> Any:
    """TRL's denominator for the loss types that have one."""
    if trainer.loss_type not in trl_losses.NEED_NORMALIZER:
        return None
    if trainer.loss_type == "dr_grpo":
        return mask.shape[0] * trainer.max_completion_length
    # DDP and FSDP average the gradients of ranks, so the count is per rank.
    tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if mode == "train":  # the count is of a whole generation batch
        tokens = tokens * trainer.current_gradient_accumulation_steps
        tokens = tokens / trainer.args.steps_per_generation
    return tokens


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
    # Ranks may have different numbers of sequences.
    rows = accelerator.gather(accelerator.pad_across_processes(rows, dim=0))
    *fields, is_sequence = rows.unbind(1)
    numbers = KLStats(*(field[is_sequence > 0] for field in fields)).as_dict("kl/")
    for name, number in zip(numbers, torch.stack([*numbers.values()]).tolist(), strict=True):
        metrics[name].append(number)


def with_fused_kl(original: Any, options: Options) -> Any:
    """``GRPOTrainer._compute_loss`` with klfast's KL."""

    @functools.wraps(original)
    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        estimator: Any = getattr(self, "estimator", options.get("estimator", TRL_GRPO))
        return _loss(self, functools.partial(original, self), model, inputs, estimator)

    setattr(_compute_loss, ORIGINAL, original)
    return _compute_loss


def kl_penalty_of_ppo(
    self: Any, logprob: Tensor, ref_logprob: Tensor, *, exact: bool = False
) -> Tensor:
    """``PPOTrainer._kl_penalty`` of TRL up to 0.11."""
    return trl_losses.kl_penalty(logprob, ref_logprob, self.config.kl_penalty, exact=exact)


# The correction for vLLM's log-probs: of GRPO, and one for RLOO


def ratio_of(
    trainer: Any,
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    tool_mask: Tensor | None = None,
) -> tuple[Tensor, trl_losses.Metrics]:
    """``importance_sampling_ratio`` with the trainer's mode and bounds."""
    return trl_losses.importance_sampling_ratio(
        old_per_token_logps,
        sampling_per_token_logps,
        completion_mask,
        tool_mask,
        mode=trainer.vllm_importance_sampling_mode,
        clip_min=trainer.vllm_importance_sampling_clip_min,
        clip_max=trainer.vllm_importance_sampling_clip_max,
    )


def log_metrics(trainer: Any, mode: str, metrics: trl_losses.Metrics) -> None:
    """Appends TRL's metrics, over all ranks, to the lists of ``mode``; one gather and one copy."""
    own = torch.stack([metrics[name].float() for name in trl_losses.METRICS])
    of_ranks = trainer.accelerator.gather(own).view(-1, len(trl_losses.METRICS)).unbind(1)
    reductions = zip(of_ranks, trl_losses.METRICS.values(), strict=True)
    numbers = [getattr(column, reduce)() for column, reduce in reductions]
    for name, number in zip(trl_losses.METRICS, torch.stack(numbers).tolist(), strict=True):
        trainer._metrics[mode][name].append(number)


class RLOOSamplingMixin:
    """``class Trainer(RLOOSamplingMixin, trl.RLOOTrainer): pass``: GRPO's correction for RLOO.

    TRL's RLOO has no correction, because it asks vLLM for no log-probs. Here it asks for the
    log-probs of the sampled tokens. Each advantage is multiplied by its sequence's ratio, as GRPO
    multiplies its loss. RLOO's loss is per sequence, so the ``token_*`` modes have no meaning in
    it. Options are class attributes with ``GRPOConfig``'s names. The metrics are GRPO's
    ``sampling/...``. Without ``use_vllm`` nothing changes. A vLLM server must run with
    ``--logprobs-mode processed_logprobs``.

    Raises:
        ValueError: at construction, if the mode is no ``sequence_*`` mode.
    """

    vllm_importance_sampling_mode = "sequence_mask"
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = "vllm_importance_sampling_mode"
        check_choice(name, self.vllm_importance_sampling_mode, trl_losses.SEQUENCE_MODES)
        super().__init__(*args, **kwargs)
        if self.use_vllm:  # type: ignore[attr-defined]  # TRL's
            self.vllm_generation.logprobs = 0  # type: ignore[attr-defined]  # the sampled token's

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        trainer: Any = self
        score = super()._generate_and_score_completions  # type: ignore[misc]  # TRL's
        if not trainer.use_vllm:
            outputs: dict[str, Any] = score(inputs)
            return outputs
        mode = "train" if trainer.model.training else "eval"
        with (
            recorded(trainer.vllm_generation, "generate") as generated,
            recorded(trainer, "_get_per_token_logps_and_entropies") as forwards,
        ):
            outputs = score(inputs)
        if len(generated) != 1 or not forwards:
            raise RuntimeError(
                "_generate_and_score_completions must generate once and run the policy first, got "
                f"{len(generated)} generations and {len(forwards)} forwards"
            )
        mask = outputs["completion_mask"]
        # The policy's first forward is of the tokens that were just sampled.
        sampled = _padded(generated[0][2], mask)
        ratio, metrics = ratio_of(trainer, forwards[0][0], sampled, mask)
        log_metrics(trainer, mode, metrics)
        advantages = outputs["advantages"]
        outputs["advantages"] = advantages * ratio[:, 0].to(advantages.dtype)
        return outputs


def _padded(logprobs: list[list[list[float | None]]], mask: Tensor) -> Tensor:
    """The lists of vLLM, sampled tokens' numbers first, in the shape of the mask; None is NaN."""
    table = torch.full(mask.shape, torch.nan)
    for row, tokens in zip(table, logprobs, strict=True):
        row[: len(tokens)] = torch.tensor(
            [torch.nan if token[0] is None else token[0] for token in tokens]
        )
    return table.to(mask.device)
