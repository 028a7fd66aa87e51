"""The public functions over logits: validate, choose a backend, compute.

Shapes: B sequences of T tokens, or N packed tokens, over a vocabulary of V entries. There are S
sequences (B, or ``len(cu_seqlens) - 1``). On a GPU V is at most 2^30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from klfast import backends
from klfast.args.checks import Coefficient
from klfast.args.logits import Chosen, Logits, Temperature
from klfast.args.penalty import Reducing
from klfast.args.rows import RowsArgs, Teacher
from klfast.args.signature import Tokens
from klfast.functional import hints
from klfast.functional.dtensor import serves_dtensors
from klfast.functional.rank_check import agreed, telling
from klfast.stats.outputs import KLDivergence, Outputs, TokenLogprobs
from klfast.types.names import BackendName, DirectionName, ReductionName, ReturnEntropy, TailName

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from klfast.functional.rank_check import Group


class _TokenOptions(TypedDict, total=False):
    """The options of ``token_logprobs`` that change no type."""

    temperature: Temperature
    ignore_index: int | None
    inplace_backward: bool
    group: Group | None
    backend: BackendName


@overload
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[_TokenOptions],
) -> Tensor: ...


@overload
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    return_entropy: Literal[True, "detached"],
    **options: Unpack[_TokenOptions],
) -> TokenLogprobs: ...


@overload
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    return_entropy: ReturnEntropy,
    **options: Unpack[_TokenOptions],
) -> Tensor | TokenLogprobs: ...


@serves_dtensors
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: Temperature = 1.0,
    ignore_index: int | None = None,
    return_entropy: ReturnEntropy = False,
    inplace_backward: bool = False,
    group: Group | None = None,
    backend: BackendName = "auto",
) -> Tensor | TokenLogprobs:
    """Log-probs of tokens under ``softmax(logits / temperature)``, in nats.

    The function computes ``logits[t, k] / temperature - log(sum_v exp(logits[t, v] /
    temperature))`` at k = ``token_ids[t]``, or at K token ids for each token. On request it also
    computes the entropy ``-sum_v p_v log p_v`` of each distribution. The logits are read once,
    except for the rare row whose first entries say nothing about the others. Only the gradient
    takes memory of the logits' size, and the backward writes it in a second read. Arithmetic and
    results are fp32 for any dtype of the logits (fp64 for fp64). Finite logits may have any size:
    a row filled with the lowest number is a uniform distribution.

    The gradient at ``token_ids``, 1 - p, keeps its digits where p is nearly 1, in all dtypes.
    At margins of 25 nats to the next entry its relative error is at most 1e-3, before it is rounded
    to the logits' dtype. At larger margins the fp64 log-sum-exp has no more digits.

    Args:
        logits: [..., V], fp64, fp32, bf16 or fp16, any strides; any V >= 1. -inf (a token id that
            top-k or top-p sampling excludes) has probability 0 and no gradient. Gradients reach
            the logits in their own dtype.
        token_ids: [...], or [..., K] for the log-probs of K ids per token; any integer dtype. A
            token may have an id more than once. The gradients of equal ids are summed.
        mask: [...], any dtype, finite and >= 0. A token with a mask of 0 does not exist: its row is
            not read, and its results and gradient are 0 for any logits and any id. None keeps all.
            The mask is a constant.
        temperature: > 0, as a number or a tensor. A tensor is 0-dim, or has the first dimensions of
            the tokens' shape, such as [B], [B, 1] or [B, T], or packed [N]. No gradient reaches it.
            Logits of any dtype are divided in fp32.
        ignore_index: an id, such as -100, that marks tokens that do not exist either. With K ids
            per token it marks entries, whose log-probs are 0 and have no gradient.
        return_entropy: also return the entropies, [...]. ``"detached"``: without a gradient.
        inplace_backward: let the backward write the gradient over the logits instead of into new
            memory. Use it only if nothing needs the logits any more. Autograd raises if an op has
            saved them, but not if a caller holds them. The logits must be contiguous, not negated
            (``torch._neg_view``) and no leaf. They must not share the memory of a leaf through a
            Python ``autograd.Function`` that returns its input detached. (The same in C++ is not
            detected.) A second backward raises.
        group: the ranks that share the vocabulary (tensor parallelism), as a process group or a
            mesh of one dimension. ``logits`` is this rank's shard of the vocabulary, in the order
            of ranks. A shard may have any number of entries, even none. Ids are ids of the whole
            vocabulary, and everything else is the same on every rank. The result has the same bits
            on every rank. The forward sends a few values per token in one all-gather. The backward
            sends nothing, and gives each rank the gradient of its own logits. All ranks must
            compute the same loss, and must not sum it over the ranks. Ranks that do not agree raise
            the same error. On a GPU, under an NCCL-only group, they get NaN unless
            ``KLFAST_CHECK=1``. torch.compile breaks its graph here.
        backend: ``"auto"``, ``"native"``, ``"triton"`` or ``"reference"``. An explicit backend
            works or raises.

    Returns:
        The log-probs in the shape of ``token_ids``; with ``return_entropy``
        :class:`klfast.TokenLogprobs`.

    Raises:
        ValueError: a wrong shape, device, layout or value; the message names the argument. On a CPU
            this includes an id outside of [0, V) at a kept token, and a temperature that is not
            > 0. On a GPU a check would need a sync, so the log-prob of such a token is NaN unless
            ``KLFAST_CHECK=1``.
        TypeError: an argument of the wrong type or dtype.
        RuntimeError: the backend asked for cannot run here (the message says why), or ranks of
            ``group`` make other calls or are gone.

    Warns once per process about [N, V] logits that look like log-probs of sampled tokens, [B, T],
    and about logits that look like probabilities.

    Differentiable once: a second derivative raises in every backend but ``reference``. The backward
    reads log-probs and entropies again, so autograd refuses it if they were changed in place.
    """
    with telling(group):
        tokens = Tokens.of("token_logprobs", logits, of_shard=group is not None)
        args = RowsArgs.of(
            tokens,
            Logits.of(tokens),
            mask=mask,
            temperature=temperature,
            token_ids=token_ids,
            ignore_index=ignore_index,
            return_entropy=return_entropy,
            inplace_backward=inplace_backward,
        )
    return agreed_outputs(args, group, backend, logits, mask=mask).of_tokens()


class DivergenceOptions(TypedDict, total=False):
    """The options of every divergence over a vocabulary that change no type."""

    direction: DirectionName
    jsd_beta: float
    skew_alpha: float
    temperature: Temperature
    reduction: ReductionName
    weights: Tensor | None
    cu_seqlens: Tensor | None
    normalizer: float | Tensor | None
    coef: Coefficient
    group: Group | None
    backend: BackendName


@overload
def kl_divergence(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None = None,
    *,
    token_ids: None = None,
    return_entropy: Literal[False] = False,
    return_stats: Literal[False] = False,
    **options: Unpack[DivergenceOptions],
) -> Tensor: ...


@overload
def kl_divergence(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None = None,
    *,
    token_ids: Tensor,
    return_entropy: ReturnEntropy = False,
    return_stats: bool = False,
    **options: Unpack[DivergenceOptions],
) -> KLDivergence: ...


@overload
def kl_divergence(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    return_entropy: Literal[True, "detached"],
    return_stats: bool = False,
    **options: Unpack[DivergenceOptions],
) -> KLDivergence: ...


@overload
def kl_divergence(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    return_entropy: ReturnEntropy = False,
    return_stats: Literal[True],
    **options: Unpack[DivergenceOptions],
) -> KLDivergence: ...


@overload
def kl_divergence(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    return_entropy: ReturnEntropy = False,
    return_stats: bool = False,
    **options: Unpack[DivergenceOptions],
) -> Tensor | KLDivergence: ...


@serves_dtensors
def kl_divergence(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None = None,
    *,
    direction: DirectionName = "reverse",
    jsd_beta: float = 0.5,
    skew_alpha: float = 0.1,
    temperature: Temperature = 1.0,
    token_ids: Tensor | None = None,
    return_entropy: ReturnEntropy = False,
    reduction: ReductionName = "none",
    weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    coef: Coefficient = 1.0,
    return_stats: bool = False,
    group: Group | None = None,
    backend: BackendName = "auto",
) -> Tensor | KLDivergence:
    """``coef`` times the reduced exact divergence of a policy and a reference, in nats.

    The function computes ``mask * weights * D`` for each kept token. D sums over the vocabulary,
    with p = softmax(logits / temperature) and q = softmax(ref_logits / temperature):

    ============ ==================================================================================
    direction    D
    ============ ==================================================================================
    reverse      KL(p || q) = sum p log(p / q), which the estimators of :func:`kl_penalty` estimate
    forward      KL(q || p) = sum q log(q / p)
    jsd          (1 - b) KL(p || m) + b KL(q || m), m = (1 - b) p + b q, b = ``jsd_beta``
    tv           1/2 sum abs(p - q), the total variation
    skew-reverse KL(p || m), m = a p + (1 - a) q, a = ``skew_alpha``
    skew-forward KL(q || m), m = a q + (1 - a) p
    ============ ==================================================================================

    A vocabulary entry with a logit of -inf in both models adds 0. ``reverse`` and ``forward`` are
    infinite if the other model excludes an entry that the first allows. Both logits are read once
    for these two. They are read twice for the others, and in the rare row whose first entries say
    nothing about the others. Only gradients take memory of the logits' size. For scalar reductions
    the forward computes them in its read, unless ``token_ids`` or ``return_entropy`` is given, the
    logits are fp16, or torch.compile or torch.func traces. Otherwise the backward reads the logits
    again.

    Finite logits may have any size. A log-ratio beyond the arithmetic's largest number counts as
    that number in a KL, and has an infinite gradient. The jsd never exceeds ``-b log b - (1 - b)
    log(1 - b)``, tv never 1, and a skewed KL never ``-log a``. D is accurate near 0. In fp32 its
    relative error is 2e-6 at 5e-7 nats. D is never negative, and exactly 0 for equal logits.
    Arithmetic and results are fp32 for any dtypes of the inputs (fp64 if one is fp64).

    Args:
        logits: logits of the policy, [B, T, V], or packed [N, V] with ``cu_seqlens``. [N, V]
            without it is one sequence. fp64, fp32, bf16 or fp16, any strides; any V >= 1.
        ref_logits: logits of the reference; may differ in dtype. Gradients reach ``logits``, and
            ``ref_logits`` if it requires them, in their own dtype.
        mask: [B, T] or [N], which tokens exist, and their weights, as in :func:`kl_penalty`. Rows
            of masked tokens are not read.
        direction: see above.
        jsd_beta: b, the reference's weight in the mixture, between 0 and 1.
        skew_alpha: a, the weight of the first model of the KL in the mixture; 0 (the KL itself), or
            from 1e-30 to below 1.
        temperature: of both models, as in :func:`token_logprobs`.
        token_ids: [B, T] or [N], any integer dtype. Also return the log-probs of these tokens under
            both models, from the same read, each with its gradient. They are 0 where masked.
        return_entropy: also return the entropies of the policy, ``-sum p log p``, from the same
            read. They are [B, T] or [N] with every reduction, and have a gradient to ``logits``, as
            in :func:`token_logprobs`. ``mask`` only leaves tokens out, and ``coef`` does not scale
            them. Where D is NaN, they and the log-probs may be NaN too, whichever model's logits
            are the cause. ``"detached"``: without a gradient.
        reduction, weights, cu_seqlens, normalizer, coef, backend: as in :func:`kl_penalty`.
        return_stats: also return :class:`klfast.KLStats`; ``kl`` is the sum of ``mask * D``.
        group: the ranks that share the vocabulary, as in :func:`token_logprobs`. Both logits are
            this rank's shards. Only ``reverse`` and ``forward`` accept it. The others are no sums
            over shards.

    Returns:
        The divergence. If you ask for anything else, :class:`klfast.KLDivergence`, with None for
        outputs that you did not ask for.

    Raises:
        ValueError, TypeError: as :func:`kl_penalty`.
        RuntimeError: as :func:`token_logprobs`.

    Warns, once per process each, about [N, V] logits that look like log-probs of sampled tokens,
    [B, T], about logits that look like probabilities, and about [N, V] logits without
    ``cu_seqlens`` under a reduction by sequences.

    Differentiable once: a second derivative raises in every backend but ``reference``.

    On a CPU, if an entry has more than half of the probability, its gradient is minus the sum of
    all others. It keeps its digits at any margin. On a GPU the relative error is up to 1e-3 at
    margins of 17 nats, and 1 at margins of 25 nats, where fp32 rounds p to 1.

    Sources, with the reference as the teacher: ``jsd`` is from R. Agarwal et al., "On-Policy
    Distillation of Language Models" (2024, arXiv:2306.13649), section 2. The skewed KLs are from J.
    Ko et al., "DistiLLM" (2024, arXiv:2402.03898), section 3.1.
    """
    reducing = Reducing(reduction, weights, cu_seqlens, normalizer, coef, return_stats)
    of_shard = group is not None
    # Other ranks would wait forever for a rank that refuses its arguments.
    with telling(group):
        chosen = Chosen.of(direction, jsd_beta, skew_alpha, of_shard=of_shard)
        tokens = Tokens.of("kl_divergence", logits, cu_seqlens, of_shard=of_shard)
        args = RowsArgs.of(
            tokens,
            Logits.of(tokens, ref_logits, chosen),
            mask=mask,
            temperature=temperature,
            token_ids=token_ids,
            return_entropy=return_entropy,
            chosen=chosen,
            reducing=reducing,
        )
    outputs = agreed_outputs(args, group, backend, logits, ref_logits, mask=mask, reducing=reducing)
    return outputs.of_divergence()


class _TopKOptions(DivergenceOptions, total=False):
    tail: TailName


@overload
def topk_kl_divergence(
    logits: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[_TopKOptions],
) -> Tensor: ...


@overload
def topk_kl_divergence(
    logits: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: Literal[True],
    **options: Unpack[_TopKOptions],
) -> KLDivergence: ...


@overload
def topk_kl_divergence(
    logits: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: bool,
    **options: Unpack[_TopKOptions],
) -> Tensor | KLDivergence: ...


@serves_dtensors
def topk_kl_divergence(
    logits: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    direction: DirectionName = "forward",
    tail: TailName = "bucket",
    jsd_beta: float = 0.5,
    skew_alpha: float = 0.1,
    temperature: Temperature = 1.0,
    reduction: ReductionName = "none",
    weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    coef: Coefficient = 1.0,
    return_stats: bool = False,
    group: Group | None = None,
    backend: BackendName = "auto",
) -> Tensor | KLDivergence:
    """``coef`` times the reduced divergence of a student from a teacher's top-K log-probs, in nats.

    Only the teacher's log-probs at K token ids are known, as an inference server returns them. The
    function computes ``mask * weights * D`` for each kept token. p is the teacher's distribution
    and q = softmax(logits / temperature). P and Q are the sums of p and q over a token's K entries:

    =============== ====================================================== =========================
    tail            what D compares                                        property
    =============== ====================================================== =========================
    ``bucket``      K + 1 categories; the last holds 1 - P and 1 - Q       >= 0, and at most the
                                                                           full divergence
    ``renormalize`` p / P and q / Q                                        >= 0, and 0 for one entry
    ``generalized`` p and q, by the terms x log(x / y) - x + y             >= 0
    ``drop``        p and q, by the terms x log(x / y)                     may be negative
    =============== ====================================================== =========================

    ============ ==================================================================================
    direction    D
    ============ ==================================================================================
    forward      the sum over entries of terms in x = p, y = q (KL(p || q), the teacher's
                 expectation)
    reverse      the sum in x = q, y = p (KL(q || p))
    jsd          (1 - b) times the terms in (q, m) plus b times the terms in (p, m), with
                 m = (1 - b) q + b p and b = ``jsd_beta``
    tv           1/2 sum abs(p - q), >= 0 with every tail
    skew-reverse the terms in x = q, y = a q + (1 - a) p with a = ``skew_alpha``
    skew-forward the terms in x = p, y = a p + (1 - a) q
    ============ ==================================================================================

    The student's log-probs come from one read of the logits. Only the gradient takes memory of the
    logits' size, and the backward writes it in a second read. Arithmetic on [tokens, K] values is
    fp64, and the result is fp32 (fp64 for fp64 logits). The student's log-probs are not rounded
    before. So the result is right to one rounding for Q up to 1 - 2^-24, on devices with float64.
    The gradient of a tail's entry is right to a relative 1e-5, before it is rounded to the logits'
    dtype. A tail 1 - Q is never less than 2^-24, where its gradient ends. If the teacher's
    log-probs sum to a probability of 1 or more, 1 - P has the same lower bound.

    Args:
        logits: logits of the student, [B, T, V], or packed [N, V] with ``cu_seqlens``, as in
            :func:`kl_divergence`.
        ref_token_ids: [B, T, K] or [N, K], K >= 1, any integer dtype. They are the teacher's token
            ids in any order, each at most once per token. Any ids are allowed, such as the
            student's own top-K.
        ref_logprobs: [B, T, K] or [N, K], the teacher's log-probs of these ids; fp64, fp32, bf16 or
            fp16. -inf marks an entry that does not exist, and its id is not read. A token without
            entries is left out as if masked, in numerator and denominator. Gradients reach
            ``ref_logprobs`` if it requires them.
        mask: [B, T] or [N], as in :func:`kl_penalty`.
        direction, tail: see above.
        jsd_beta: b, the teacher's weight in the mixture, between 0 and 1.
        skew_alpha: a, the weight of x in the mixture, as in :func:`kl_divergence`.
        temperature: of the student, as in :func:`token_logprobs`. Only under ``"renormalize"`` it
            applies to the teacher too. Other tails would need the teacher's tail at this
            temperature, which is not known.
        reduction, weights, cu_seqlens, normalizer, coef, backend: as in :func:`kl_penalty`.
        return_stats: also return :class:`klfast.KLStats`; ``kl`` is the sum of ``mask * D``.
        group: the ranks that share the vocabulary, as in :func:`token_logprobs`. ``logits`` is this
            rank's shard, and ``ref_token_ids`` are ids of the whole vocabulary. Every
            ``direction`` accepts it, as only the entries' log-probs are needed.

    Returns:
        The divergence; with ``return_stats`` :class:`klfast.KLDivergence`.

    Raises:
        ValueError: a wrong shape, device, layout, choice or value; the message names the argument.
            On a CPU this includes an id outside of [0, V), and an id that a token has twice. On a
            GPU a check would need a sync. Unless ``KLFAST_CHECK=1``, the first gives NaN and the
            second counts twice. ``"renormalize"`` with K = 1 raises too, as it is always 0.
        TypeError, RuntimeError: as :func:`token_logprobs`.

    Warns once per process about ``ref_logprobs`` above 0, which look like logits, and about entries
    of a token whose probabilities sum to more than 1.

    Differentiable once: a second derivative raises in every backend but ``reference``.

    Sources: ``bucket`` and ``drop`` are from TRL's and verl's distillation, ``generalized`` from
    MOPD (2026, arXiv:2606.30406).
    """
    reducing = Reducing(reduction, weights, cu_seqlens, normalizer, coef, return_stats)
    with telling(group):
        chosen = Chosen.of(direction, jsd_beta, skew_alpha)
        tokens = Tokens.of("topk_kl_divergence", logits, cu_seqlens, of_shard=group is not None)
        args = RowsArgs.of(
            tokens,
            Logits.of(tokens),
            mask=mask,
            temperature=temperature,
            teacher=Teacher.of(tokens, ref_token_ids, ref_logprobs, chosen, tail),
            reducing=reducing,
        )
    outputs = agreed_outputs(
        args, group, backend, logits, ref_logprobs, mask=mask, reducing=reducing
    )
    return outputs.of_divergence()


def agreed_outputs(
    args: RowsArgs,
    group: Group | None,
    backend: BackendName,
    *hinted: Tensor,
    mask: Tensor | None = None,
    reducing: Reducing = Reducing(),  # noqa: B008 (a constant)
) -> Outputs:
    """The outputs of a checked call, on which the ranks of ``group`` have agreed.

    ``hints`` looks for mistakes in ``hinted``, ``mask`` and ``reducing``, as the caller gave them.
    """
    if group is not None:
        args = agreed(args, group, backend)
    outputs = backends.rows(backend, args)
    # After the call, because a refused call has an error and needs no hint.
    if hinted:
        hints.of_call(args.function, *hinted, mask=mask, reducing=reducing)
    return outputs
