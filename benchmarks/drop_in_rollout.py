"""The pairs of ``drop_in.py`` between sampler and trainer: verl's rollout correction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import Batch, Function, Pair
from klfast import compat

RULES = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.2_5.0,1.0"}
"""A rule over tokens and one over sequences. No token is so near to a bound that rounding decides;
neither side's time depends on how many fail."""


def verl_pairs() -> Iterator[Pair]:
    from verl.trainer.ppo import rollout_corr_helper as theirs

    def correction(of: Any, **options: Any) -> Function:
        compute: Callable[..., Any] = of.compute_rollout_correction_and_rejection_mask

        def run(batch: Batch) -> tuple[Tensor, ...]:
            weights, mask, metrics = compute(
                batch.logprobs, batch.old_logprobs, batch.mask, **options
            )
            assert metrics  # floats: both have copied them from the device
            return weights.batch["rollout_is_weights"], mask

        return run

    def drift(of: Any) -> Function:
        compute: Callable[..., Any] = of.compute_offpolicy_metrics

        def run(batch: Batch) -> Tensor:
            metrics = compute(batch.logprobs, batch.old_logprobs, batch.mask)
            return torch.tensor([metrics["training_log_ppl"], metrics["rollout_log_ppl"]])

        return run

    for what, options in (
        ("token weights, a rule over tokens, one over sequences, all metrics", RULES),
        ("token weights and all metrics", {}),
    ):
        chosen: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": 2.0, **options}
        yield Pair(
            "verl",
            f"`compute_rollout_correction_and_rejection_mask`, {what}",
            correction(theirs, **chosen),
            correction(compat.verl, **chosen),
        )
    yield Pair("verl", "`compute_offpolicy_metrics`", drift(theirs), drift(compat.verl))
