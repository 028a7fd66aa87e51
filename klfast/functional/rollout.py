"""``rollout_correction``: validate, choose a backend, compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from klfast import backends
from klfast.args.checks import check_choice
from klfast.args.keywords import explains_keywords
from klfast.args.penalty import Reducing
from klfast.args.rejection import Rejection
from klfast.args.rollout import RolloutSpec, rollout_call
from klfast.args.rollout_presets import PRESETS
from klfast.distributed.ranks import Ranks
from klfast.functional import hints
from klfast.stats.rollout import RolloutCorrection
from klfast.types.names import BackendName

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

F = TypeVar("F", bound=Callable[..., Any])


def _with_presets(function: F) -> F:
    """Add the options of ``preset`` that the caller does not give."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        preset = options.get("preset")
        if preset is None:
            return function(*args, **options)
        check_choice("preset", preset, PRESETS)
        return function(*args, **{**PRESETS[preset], **options})

    return cast(F, call)


@explains_keywords
@_with_presets
@torch.no_grad()
def rollout_correction(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    preset: str | None = None,
    weight: str | None = "token",
    floor: float | None = None,
    cap: float | None = 2.0,
    outside: str = "truncate",
    reject: Rejection | Sequence[Rejection] = (),
    normalize: str | None = None,
    cu_seqlens: Tensor | None = None,
    advantages: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    backend: BackendName = "auto",
) -> RolloutCorrection:
    """Correct the policy loss for tokens that another policy sampled, and measure the drift.

    The rollout policy is the policy as the inference engine computes it, often from an older step.
    ``x = logprobs - rollout_logprobs`` in nats is positive if the token is more likely under the
    policy than under the rollout policy, which sampled it. u is x (``weight="token"``), the sum of
    x over the sequence (``"sequence"``) or its mean (``"geometric"``). Sum and mean are weighted by
    the mask. A token's weight is

    ======================== ==================================================================
    ``outside="truncate"``   exp(u) moved into [floor, cap] (truncated importance sampling, TIS)
    ``outside="mask"``       exp(u) inside [floor, cap], 0 outside (MIS, IcePop)
    ======================== ==================================================================

    Bounds are inclusive, and are compared with u as their logarithms. u is limited to [-20, 20]
    before exp, so that a weight is finite even without a cap. Rejection criteria reject tokens and
    whole sequences independently of the weights and of each other. A token that fails any of them
    is 0 in the mask. A kept token whose x is NaN or infinite is rejected, adds nothing to a sum of
    x, and is counted in ``stats.nonfinite``. Its weight per token is 0. No result carries a
    gradient.

    A policy log-prob of -inf is a ratio of 0 in weights and criteria of sequences. The sum and the
    mean of x are then -inf. Every token of the sequence has the weight of u = -20, within the
    bounds, and a veto rejects the sequence. These weights and criteria leave out a token whose x is
    NaN (both log-probs are -inf) or inf (only ``rollout_logprobs`` is -inf). It is in no sum and no
    length, so a mean is over the other tokens. Its weight is 0.

    Divide the loss by the count from before the rejection: ``torch.where(mask != 0, mask * weights
    * loss, 0).sum() / stats.length.sum()``, with the new mask. With klfast, call ``reduce(loss,
    mask, weights=weights, reduction="token-mean", normalizer=stats.length.sum())``, or take
    ``data_parallel_normalizer`` of the old mask. Weights in a mask's place would be in denominators
    too, where weights per sequence cancel.

    Args:
        logprobs: log-probs of the sampled tokens under the policy that is trained, or that starts
            the step. [B, T], or packed [N] with ``cu_seqlens``. [N] without it is one sequence.
            fp64, fp32, bf16 or fp16, any strides. Arithmetic and results are fp32 (fp64 if either
            is fp64).
        rollout_logprobs: the same under the rollout policy; may differ in dtype.
        mask: which tokens exist, and their weights in sums: boolean, integer or floating, in the
            shape of ``logprobs``. At a zero the inputs are selected away. None keeps all.
        preset: a name in ``klfast.rollout_presets.PRESETS``, such as ``"icepop"``, whose options
            replace the defaults below. An option that you also pass has your value.
        weight: ``"token"``, ``"sequence"``, ``"geometric"``, or None for no weights.
        floor: the least weight, > 0, or None for no bound.
        cap: the greatest weight, > 0, or None for no bound. It has no effect without weights.
        outside: ``"truncate"`` or ``"mask"``.
        reject: a :class:`Rejection`, or several, each statistic and ``over`` at most once.
        normalize: divide the weights by their mean over the batch. ``"token"`` takes the mean over
            the kept tokens. ``"sequence"`` takes the mean of the means of the sequences that keep a
            token. If the mean is 0, the weights are not divided.
        cu_seqlens: [S+1], int32 or int64: sequence s is the tokens cu_seqlens[s]:cu_seqlens[s+1].
        advantages: for criteria that are ``outward_only``, in the shape of ``logprobs``, or [S]. If
            both shapes are equal, advantages are per token.
        process_group: the ranks over whose weights ``normalize`` takes the mean (data parallelism),
            or None for this process alone.
        backend: ``"auto"``, ``"native"`` or ``"reference"``. An explicit backend works or raises.
            ``"native"`` has kernels only for CPU tensors, and ``"triton"`` has none. On a GPU,
            ``"auto"`` takes the reference, in torch ops without a sync.

    Returns:
        :class:`RolloutCorrection`: (weights, mask, stats).

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`klfast.kl_penalty`.

    Warns, once per process each, about log-probs above 0.001, which may be logits, and about [N]
    tokens without ``cu_seqlens`` with weights of sequences or a criterion over sequences.

    Sources: TIS is from F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training" (2025, fengyao.notion.site/off-policy-rl). IcePop is from the Ring-1T report
    (arXiv:2510.18855). Sequence and geometric weights and masks are from Y. Liu et al., "When Speed
    Kills Stability" (2025, richardli.xyz/rl-collapse).
    """
    spec = RolloutSpec.of(weight, floor, cap, outside, reject)
    call = rollout_call(logprobs, rollout_logprobs, mask, spec, normalize, cu_seqlens, advantages)
    if process_group is not None:
        Ranks(process_group)  # raises unless it is one, also where nothing is normalized
    corrected = backends.rollout_correction(backend, call)
    hints.of_call(
        "rollout_correction",
        logprobs,
        rollout_logprobs,
        mask=mask,
        reducing=Reducing(cu_seqlens=cu_seqlens),
        by_sequence=spec.by_sequence(),
    )
    if normalize is None or corrected.weights is None:
        return corrected
    # In torch ops, because the mean may be over other ranks, and an op makes no collective.
    mean = corrected.stats.weight_mean(normalize, process_group)
    factor = torch.where(mean > 0, mean, 1.0).to(corrected.weights.dtype)
    return corrected._replace(weights=corrected.weights / factor)
