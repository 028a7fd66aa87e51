"""The correction for vLLM's log-probs inside TRL's trainers: of GRPO, and one for RLOO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from klfast.checks.arguments import check_choice
from klfast.compat.trl_recording import recorded
from klfast.compat.trl_sampling import (
    METRICS,
    SEQUENCE_MODES,
    Metrics,
    importance_sampling_ratio,
)


def ratio_of(
    trainer: Any,
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    tool_mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """``importance_sampling_ratio`` with the trainer's mode and bounds."""
    return importance_sampling_ratio(
        old_per_token_logps,
        sampling_per_token_logps,
        completion_mask,
        tool_mask,
        mode=trainer.vllm_importance_sampling_mode,
        clip_min=trainer.vllm_importance_sampling_clip_min,
        clip_max=trainer.vllm_importance_sampling_clip_max,
    )


def log_metrics(trainer: Any, mode: str, metrics: Metrics) -> None:
    """Appends TRL's numbers, of all ranks, to those of ``mode``; one gather and one copy."""
    own = torch.stack([metrics[name].float() for name in METRICS])
    of_ranks = trainer.accelerator.gather(own).view(-1, len(METRICS)).unbind(1)
    numbers = [
        getattr(column, reduce)() for column, reduce in zip(of_ranks, METRICS.values(), strict=True)
    ]
    for name, number in zip(METRICS, torch.stack(numbers).tolist(), strict=True):
        trainer._metrics[mode][name].append(number)


class GRPO:
    """The functions that rewritten ``GRPOTrainer._generate_and_score_completions`` calls."""

    ratio_of = staticmethod(ratio_of)
    log_metrics = staticmethod(log_metrics)


class RLOOSamplingMixin:
    """``class Trainer(RLOOSamplingMixin, trl.RLOOTrainer): pass``: GRPO's correction for RLOO.

    TRL's RLOO has none: it asks vLLM for no log-probs. Here it asks for those of the sampled
    tokens, and each advantage is multiplied by its sequence's ratio, as GRPO multiplies its loss;
    RLOO's loss is per sequence, so the ``token_*`` modes have no meaning in it. Options are class
    attributes under the names of ``GRPOConfig``; the metrics are GRPO's ``sampling/...``. Without
    ``use_vllm`` nothing changes. A vLLM server must run with ``--logprobs-mode
    processed_logprobs``.

    Raises:
        ValueError: at construction, if the mode is not one of the two.
    """

    vllm_importance_sampling_mode = "sequence_mask"
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = "vllm_importance_sampling_mode"
        check_choice(name, self.vllm_importance_sampling_mode, SEQUENCE_MODES)
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
