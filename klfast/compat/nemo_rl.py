"""NeMo-RL: ``nemo_rl.algorithms.utils.calculate_kl``, and the KL of its loss and of its rewards.

Its main branch of August 2026. Use ``from klfast.compat.nemo_rl import calculate_kl`` in place of
NeMo-RL's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from klfast.api import kl_penalty as fused_kl_penalty
from klfast.api import kl_rewards
from klfast.checks.arguments import check_choice
from klfast.compat.common import choose
from klfast.compat.counts import count_of_tokens
from klfast.compat.nemo_rl_distillation import distillation_loss
from klfast.compat.presets import NEMO_RL
from klfast.compat.shards import from_parallel_logits_to_logprobs
from klfast.compat.weighted import weighted_per_token
from klfast.estimator import Estimator
from klfast.names import ReductionName

__all__ = [
    "calculate_kl",
    "distillation_loss",
    "from_parallel_logits_to_logprobs",
    "kl_loss",
    "token_level_rewards",
]

LOSS_TYPES: dict[str, ReductionName] = {
    "token_level": "token-mean",
    "sequence_level": "seq-mean-token-mean",
}
"""The values of ``LossType`` -> klfast's reduction."""


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """The per-token KL of NeMo-RL, in nats, of the shape of ``logprobs``; there is no mask here.

    ``kl_type``: ``k1``, ``k2`` or ``k3`` of the log-ratio limited to ``input_clamp_value``, times
    the weights, limited to ``output_clamp_value``; None limits nothing (see ``presets.NEMO_RL``).
    Where the first limit acts no gradient flows to the weights, where the second acts none at all.
    A weight of NaN gives NaN; the loss makes it 0 before, and so does :func:`kl_loss`, which takes
    the sampler's log-probs in place of the weights, and reads once.

    Differs from NeMo-RL: low-precision inputs give fp32 (``exact=True``: their own dtype), k3 keeps
    its digits near 0, and where ``exp`` or a weight overflows under an ``output_clamp_value`` the
    gradient is 0, not NaN (``exact=True`` takes that back). An unknown word is a ValueError, and
    so are weights of another shape, which NeMo-RL broadcasts.
    """
    estimator = _estimator(kl_type, input_clamp_value, output_clamp_value)
    return weighted_per_token(
        logprobs,
        logprobs_reference,
        estimator,
        importance_sampling_weights,
        argument="importance_sampling_weights",
        exact=exact,
    )


def _estimator(kl_type: str, input_clamp: float | None, output_clamp: float | None) -> Estimator:
    preset = choose("kl_type", kl_type, NEMO_RL)
    return replace(preset, log_ratio_clip=input_clamp, kl_clip=output_clamp)


def kl_loss(
    curr_logprobs: Tensor,
    reference_policy_logprobs: Tensor,
    token_mask: Tensor,
    sample_mask: Tensor | None = None,
    *,
    generation_logprobs: Tensor | None = None,
    reference_policy_kl_penalty: float = 0.01,
    reference_policy_kl_type: str = "k3",
    kl_input_clamp_value: float | None = 20.0,
    kl_output_clamp_value: float | None = 10.0,
    loss_type: Any = "token_level",
    global_valid_toks: float | Tensor | None = None,
    global_valid_seqs: float | Tensor | None = None,
) -> Tensor:
    """The KL term of ``ClippedPGLossFn`` (0-dim, nats times the penalty) in one read.

    ``penalty * masked_mean(calculate_kl(..., importance_sampling_weights=w), mask)`` with
    ``w = exp(curr_logprobs - generation_logprobs)``, differentiable; NaN and infinite weights are
    0.

    Args:
        curr_logprobs: [B, T], of the policy (unfiltered by top-k and top-p).
        reference_policy_logprobs: [B, T], of the reference.
        token_mask: [B, T]; what a masked token holds, NaN too, has no effect.
        sample_mask: [B] of zeros and ones, or None.
        generation_logprobs: [B, T], of the sampler: ``use_on_policy_kl_approximation``. None: of
            the policy itself, a weight of 1 with the gradient of the ratio.
        reference_policy_kl_penalty: the coefficient.
        reference_policy_kl_type: see :func:`calculate_kl`, like the next two.
        kl_input_clamp_value: see there.
        kl_output_clamp_value: see there.
        loss_type: ``"token_level"``: mean over kept tokens; ``"sequence_level"``: over kept
            samples of their means over tokens; or NeMo-RL's ``LossType``.
        global_valid_toks: the number of tokens to divide by, where it is not the local one; 0 where
            no token is kept, and the loss is 0. NeMo-RL's is the number of all ranks, undivided:
            its FSDP workers multiply the loss by ``dp_size * cp_size``. Under DDP and FSDP, which
            average gradients, divide it by the world size where nothing multiplies the loss.
        global_valid_seqs: the same of samples.

    Differs from NeMo-RL: the gradient of an infinite weight is 0, not NaN; NaN under the mask stays
    there; nothing is added to the denominators (1e-8 there).
    """
    loss_type = getattr(loss_type, "value", loss_type)
    check_choice("loss_type", loss_type, tuple(LOSS_TYPES))
    mask, normalizer = token_mask, global_valid_toks
    if sample_mask is not None:
        mask = token_mask * sample_mask.unsqueeze(-1)
    if loss_type == "sequence_level":
        normalizer = global_valid_seqs
        if normalizer is None:  # samples without a kept token count, as in NeMo-RL
            kept = mask.shape[0] if sample_mask is None else sample_mask.sum().clamp(min=1)
            normalizer = kept if isinstance(kept, Tensor) else max(1, kept)
        else:
            normalizer = count_of_tokens("global_valid_seqs", normalizer)
    elif normalizer is not None:
        normalizer = count_of_tokens("global_valid_toks", normalizer)
    return fused_kl_penalty(
        curr_logprobs,
        reference_policy_logprobs,
        mask,
        estimator=_estimator(reference_policy_kl_type, kl_input_clamp_value, kl_output_clamp_value),
        reduction=LOSS_TYPES[loss_type],
        old_logprobs=curr_logprobs.detach() if generation_logprobs is None else generation_logprobs,
        normalizer=normalizer,
        coef=reference_policy_kl_penalty,
    )


def token_level_rewards(
    rewards: Tensor,
    mask: Tensor,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    kl_coef: float,
    kl_type: str = "k3",
) -> Tensor:
    """The rewards [B, T] of NeMo-RL's PPO with ``use_kl_in_reward``: no gradient, 0 where masked.

    ``-kl_coef * calculate_kl(logprobs, reference_logprobs, kl_type)`` at every kept token, plus
    ``rewards[b]`` at the last one; ``kl_coef`` is in reward units per nat. Differs from NeMo-RL:
    NaN under the mask has no effect; fp32 for lower dtypes.
    """
    return kl_rewards(
        rewards,
        logprobs,
        reference_logprobs,
        mask,
        kl_coef=kl_coef,
        estimator=choose("kl_type", kl_type, NEMO_RL),
    )
