"""A sampler that is not the policy: its weights are some steps old and rounded to 8 bits.

Both are usual: asynchronous training samples while the policy learns, and inference engines compute
in fp8. What corrects for them is ``klfast.rollout_correction``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from klfast import (
    RolloutCorrection,
    RolloutStats,
    kl_penalty,
    rollout_correction,
    token_logprobs,
)
from klfast.rollout.presets import PRESETS
from lab.model import GPT, Batch, continuation_logits
from lab.team import whole_weights

FP8 = torch.float8_e4m3fn

DRIFT = (
    *("kl", "k3", "log_ppl_diff", "max_log_ratio", "min_log_ratio", "chi2_token", "ess"),
    *("weight_mean", "outside", "rejected_tokens", "rejected_sequences", "nonfinite"),
)
"""The numbers recorded of each step, under the names of ``RolloutStats.as_dict``."""


def synchronize(sampler: GPT, policy: nn.Module) -> None:
    """Gives the sampler the policy's weights, rounded."""
    sampler.load_state_dict({name: rounded(w) for name, w in whole_weights(policy).items()})


@torch.no_grad()
def rounded(weight: Tensor) -> Tensor:
    """A matrix as fp8 (e4m3) with one scale holds it; vectors stay, as in inference engines."""
    if weight.dim() < 2:
        return weight
    scale = weight.abs().amax().clamp(min=torch.finfo(weight.dtype).tiny) / torch.finfo(FP8).max
    return (weight / scale).to(FP8).to(weight.dtype) * scale


@torch.no_grad()
def correct(
    sampler: GPT, logprobs: Tensor, batch: Batch, advantage: Tensor, preset: str
) -> RolloutCorrection:
    """``rollout_correction`` of a batch that the sampler drew; ``logprobs`` are the policy's.

    ``advantage`` [B] is for presets in which its sign decides.
    """
    logits = continuation_logits(sampler, batch.prompts, batch.continuations)
    options = PRESETS[preset]
    signs = any(rule.outward_only for rule in options.get("reject", ()))
    return rollout_correction(
        logprobs,
        token_logprobs(logits, batch.continuations),
        batch.mask,
        advantages=advantage.to(logprobs.dtype) if signs else None,
        **options,
    )


def token_weights(corrected: RolloutCorrection) -> Tensor:
    """The factor of each token in the loss and in the penalty: its weight, 0 where rejected."""
    if corrected.weights is None:
        return corrected.mask
    return corrected.weights * corrected.mask


@torch.no_grad()
def weighted_kl(corrected: RolloutCorrection, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``[B]`` the KL to the reference by k1 under those weights, in nats per sequence.

    Given the tokens before it, a token's ``weight * k1`` has the exact KL as its expectation, but
    for the bounds of the weight.
    """
    weights = token_weights(corrected)
    return kl_penalty(logprobs, ref_logprobs, weights, estimator="k1", reduction="seq-sum")


def drift_record(stats: RolloutStats) -> dict[str, float]:
    """The numbers of a step, of the sequences of all ranks."""
    numbers = stats.as_dict("")
    return {name: float(numbers[name]) for name in DRIFT}
