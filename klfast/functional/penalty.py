"""The public functions over log-probs and other per-token values: validate, choose a backend,
compute.

Shapes: B sequences of T tokens, or N packed tokens; S sequences (B, or ``len(cu_seqlens) - 1``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from klfast import backends
from klfast.args.checks import Coefficient
from klfast.args.estimator import Estimator
from klfast.args.penalty import Reducing, penalty_call, reduce_call, rewards_call
from klfast.functional import hints
from klfast.functional.dtensor import serves_dtensors
from klfast.stats.kl import KLStats
from klfast.types.names import BackendName, EstimatorName, ReductionName

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack


class _PenaltyOptions(TypedDict, total=False):
    """The options of ``kl_penalty`` that change no type."""

    estimator: EstimatorName | Estimator
    reduction: ReductionName
    cu_seqlens: Tensor | None
    old_logprobs: Tensor | None
    weights: Tensor | None
    normalizer: float | Tensor | None
    coef: Coefficient
    backend: BackendName


@overload
def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[_PenaltyOptions],
) -> Tensor: ...


@overload
def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: Literal[True],
    **options: Unpack[_PenaltyOptions],
) -> tuple[Tensor, KLStats]: ...


@overload
def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: bool,
    **options: Unpack[_PenaltyOptions],
) -> Tensor | tuple[Tensor, KLStats]: ...


@serves_dtensors
def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: EstimatorName | Estimator = "k3",
    reduction: ReductionName = "none",
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    coef: Coefficient = 1.0,
    return_stats: bool = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, KLStats]:
    """``coef`` times the reduced KL penalty of a policy against a reference, in nats.

    The function computes ``mask * weights * w * f(x)`` for each kept token.
    ``x = logprobs - ref_logprobs`` is positive if the token is more likely under the policy than
    under the reference. f is the formula of the estimator, see :class:`klfast.Estimator`. The
    weight is ``w = exp(logprobs - old_logprobs)``, or 1 without ``old_logprobs``. Arithmetic and
    results are fp32 for any dtypes of the inputs (fp64 if any is fp64).

    Args:
        logprobs: log-probs of the sampled tokens under the policy, [B, T], or packed [N] with
            ``cu_seqlens``. [N] without it is one sequence. fp64, fp32, bf16 or fp16, any strides.
        ref_logprobs: the same under the reference; may differ in dtype. Gradients reach
            ``logprobs``, and ``ref_logprobs`` if it requires them, in their own dtype.
        mask: which tokens exist, and their weights: boolean, integer or floating, in the shape of
            ``logprobs``. At a zero the inputs are selected away: NaN there reaches neither value
            nor gradient, which is exactly 0. None keeps all. The mask is a constant, like
            ``weights``: one that requires a gradient raises. Its weights are in the denominators
            of means too, so that they make weighted means.
        estimator: a name (``k1``, ``abs``, ``k2``, ``k3``, ``k3_ref``, ``r_log_r``, an alias
            ``mse``, ``low_var_kl``, or, for the gradient of k2, ``k1+``, ``k2+``, ``k3+``) or an
            :class:`klfast.Estimator`. In a loss ``k3+`` has the gradient of the reverse KL in
            expectation, and with ``old_logprobs`` off-policy too. Without ``old_logprobs``, ``k3``
            has the gradient of the forward KL, and the expected gradient of ``k1`` is 0.
        reduction: ``"none"``: per token, in the shape of ``logprobs``, 0 where masked.
            ``"seq-sum"``, ``"seq-mean"``: [S]. The mean of an empty sequence is 0.
            ``"token-sum"``, ``"token-mean"``: over all tokens, 0-dim.
            ``"seq-mean-token-sum"``, ``"seq-mean-token-mean"``: the sum or mean of each sequence,
            averaged over the sequences that keep a token, 0-dim. Means divide by the mask's sum.
            A mean over no tokens is 0.
        cu_seqlens: [S+1], int32 or int64: sequence s is the tokens cu_seqlens[s]:cu_seqlens[s+1].
        old_logprobs: log-probs under the policy that sampled the tokens; a constant. They weigh
            each token by ``exp(logprobs - old_logprobs)``.
        weights: >= 0, a weight for each token, [B, T] or [N], or for each sequence, [B, 1] or [S],
            in any floating dtype, such as ``rollout_correction(...).weights``. They multiply the
            tokens' values and gradients, and are in no denominator: ``mask`` alone decides lengths
            and counts. A token of weight 0 is selected away like a masked one, but is counted. A
            weight under the mask is not read. The statistics are those without weights, and
            ``RolloutStats`` has sums of weights.
        normalizer: a number or 0-dim tensor > 0 that replaces the outer denominator of a scalar
            mean. This is the token count for ``token-mean``, and the sequence count for the others.
            DDP and FSDP average gradients, so pass the count of all ranks divided by the world
            size, :func:`klfast.data_parallel_normalizer`. With the undivided count the gradient is
            too small by a factor of the world size.
        coef: a number, a 0-dim tensor, or a controller, whose ``value`` is used; a constant.
        return_stats: also return :class:`klfast.KLStats` from the same read.
        backend: ``"auto"``, ``"native"``, ``"triton"`` or ``"reference"``. An explicit backend
            works or raises.

    Returns:
        The penalty, or (penalty, stats).

    Raises:
        ValueError: a wrong shape, device, layout, choice or value; the message names the argument.
            Values of GPU tensors are checked only under ``KLFAST_CHECK=1``, as this needs a sync.
        TypeError: an argument of the wrong type or dtype.
        RuntimeError: the backend asked for cannot run here; the message says why.

    Warns, once per process each, about ``k1`` without ``old_logprobs`` if ``logprobs`` is
    differentiable, about log-probs above 0.001, which may be logits, and about [N] tokens without
    ``cu_seqlens`` under a reduction by sequences. It also warns about NaN without a mask, about a
    negative ``coef``, and about weights in ``mask`` that cancel: one for each sequence, which is
    divided by its own length. ``klfast.functional.hints`` says when values are read.

    Differentiable once: a second derivative raises in every backend but ``reference``.

    Source: see :class:`klfast.Estimator` for the estimators. The names of the scalar means are
    from verl's ``loss_agg_mode``.
    """
    reducing = Reducing(reduction, weights, cu_seqlens, normalizer, coef, return_stats)
    call = penalty_call(logprobs, ref_logprobs, mask, estimator, reducing, old_logprobs)
    penalty, stats = backends.kl_penalty(backend, call)
    hints.of_gradient(call)
    hints.of_call("kl_penalty", logprobs, ref_logprobs, old_logprobs, mask=mask, reducing=reducing)
    return penalty if stats is None else (penalty, stats)


class _RewardsOptions(TypedDict, total=False):
    """The options of ``kl_rewards`` that change no type."""

    kl_coef: Required[Coefficient]
    estimator: EstimatorName | Estimator
    cu_seqlens: Tensor | None
    backend: BackendName


@overload
def kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[_RewardsOptions],
) -> Tensor: ...


@overload
def kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: Literal[True],
    **options: Unpack[_RewardsOptions],
) -> tuple[Tensor, KLStats]: ...


@overload
def kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: bool,
    **options: Unpack[_RewardsOptions],
) -> Tensor | tuple[Tensor, KLStats]: ...


@serves_dtensors
def kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    kl_coef: Coefficient,
    estimator: EstimatorName | Estimator = "k1",
    cu_seqlens: Tensor | None = None,
    return_stats: bool = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, KLStats]:
    """Per-token rewards of KL-shaped RL: ``-kl_coef * kl`` at every kept token, plus the score.

    ``kl`` is ``mask * f(x)`` in nats, with ``x = logprobs - ref_logprobs``, as in
    :func:`kl_penalty`. ``scores[s]`` is added at the last kept token of sequence s. Rewards are 0
    where masked, so the score of a sequence without a kept token is dropped. The result carries no
    gradient.

    Keep the estimator ``"k1"``. The expected policy gradient of a reward is
    ``E[f(x) grad log pi]``, which is the gradient of KL(policy || reference) for ``"k1"`` alone.
    ``"k3"`` has the gradient of KL(policy || reference) - KL(reference || policy). Near on-policy
    it is nearly 0, and so is the gradient of ``"k2"``. ``"abs"`` has another direction.

    Args:
        scores: [S], one per sequence, any real dtype. Scores that are not finite are passed on.
        logprobs: [B, T], or packed [N] with ``cu_seqlens``, in fp64, fp32, bf16 or fp16, as in
            :func:`kl_penalty`.
        kl_coef: a number, a 0-dim tensor or a controller, in reward units per nat.
        ref_logprobs, mask, estimator, cu_seqlens, return_stats, backend: as in :func:`kl_penalty`.

    Returns:
        Rewards in the shape of ``logprobs``, fp32 (fp64 for fp64 input), or (rewards, stats).

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`kl_penalty`.

    Warns, once per process each, about an estimator other than ``k1``, which alone has the gradient
    of a KL in a reward, and about values as :func:`kl_penalty` does.

    Source: D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019,
    arXiv:1909.08593), section 2.
    """
    reducing = Reducing(cu_seqlens=cu_seqlens, coef=kl_coef, return_stats=return_stats)
    call = rewards_call(scores, logprobs, ref_logprobs, mask, estimator, reducing)
    rewards, stats = backends.kl_penalty(backend, call)
    hints.of_reward(call)
    hints.of_call("kl_rewards", logprobs, ref_logprobs, mask=mask, reducing=reducing)
    return rewards if stats is None else (rewards, stats)


@serves_dtensors
def reduce(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    reduction: ReductionName,
    weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    coef: Coefficient = 1.0,
) -> Tensor:
    """``coef`` times the reduction of per-token values, such as a loss, in their unit (nats for a
    KL).

    The function reduces ``mask * weights * values`` over the kept tokens. Masks, weights, packed
    sequences, denominators and edge cases work as in :func:`kl_penalty`, so a policy loss and a KL
    are averaged alike.

    Args:
        values: [B, T], or packed [N] with ``cu_seqlens``. [N] without it is one sequence. fp64,
            fp32, bf16 or fp16, any strides. Gradients reach them in their own dtype.
        mask: which tokens exist, and their weights, as in :func:`kl_penalty`. At a zero a value is
            selected away: NaN there reaches neither result nor gradient. Multiply weights that
            require a gradient into ``values``.
        reduction, weights, cu_seqlens, normalizer, coef: as in :func:`kl_penalty`.

    Returns:
        The reduced values, fp32 (fp64 for fp64 values).

    Raises:
        ValueError, TypeError: as :func:`kl_penalty`.

    Warns once per process about [N] values without ``cu_seqlens`` under a reduction by sequences,
    and about weights in ``mask`` that cancel.

    Differentiable once, except on the ``reference``.

    Source: klfast's own. The names of the scalar means are from verl's ``loss_agg_mode``.
    """
    reducing = Reducing(reduction, weights, cu_seqlens, normalizer, coef)
    result, _ = backends.kl_penalty("auto", reduce_call(values, mask, reducing))
    hints.of_call("reduce", values, mask=mask, reducing=reducing)
    return result
