"""The public functions over logits: validate, choose a backend, compute.

Shapes: B sequences of T tokens, or N packed tokens, over a vocabulary of V words; S sequences (B,
or ``len(cu_seqlens) - 1``). On a GPU V is at most 2^30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from klfast import backends
from klfast.args.checks import Coefficient
from klfast.args.logits import Temperature
from klfast.args.rows import Reducing, kl_divergence_args, token_logprobs_args, topk_args
from klfast.functional import hints
from klfast.functional.dtensor import serves_dtensors
from klfast.functional.rank_check import args_of
from klfast.stats.outputs import KLDivergence, TokenLogprobs
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

    ``logits[t, k] / temperature - log(sum_v exp(logits[t, v] / temperature))`` at k =
    ``token_ids[t]``, or at K words of each token, and the entropy ``-sum_v p_v log p_v`` of each
    distribution. The logits are read once (but for the rare row whose first words say nothing of
    the others), and nothing of their size is made but the gradient, which the backward writes in a
    second read. Arithmetic and results are fp32 whatever the logits' dtype (fp64 for fp64). Finite
    logits of any size serve: a row filled with the lowest number is a distribution of equals.

    The gradient at the taken word, 1 - p, keeps its digits where p is nearly 1, in all dtypes: its
    relative error is at most 1e-3 at margins of 25 nats to the next word, before it is rounded to
    the logits' dtype. Beyond, the log-sum-exp's own digits in fp64 end.

    Args:
        logits: [..., V], fp64, fp32, bf16 or fp16, any strides; any V >= 1. -inf (a word that
            top-k or top-p sampling leaves out) has probability 0 and no gradient. Gradients reach
            them in their own dtype.
        token_ids: [...], or [..., K] for the log-probs of K words a token; any integer dtype. A
            word may be there more than once: its gradients are summed.
        mask: [...], any dtype, finite and >= 0: where it is 0 the token does not exist; its row is
            not read, its results are 0 and its gradient too, whatever its logits and its id are.
            None keeps all. A constant.
        temperature: > 0: a number, or a tensor of no dimensions, or one that has the first
            dimensions of the tokens' shape, such as [B], [B, 1] or [B, T], or packed [N]. No
            gradient reaches it. Logits are divided in fp32, whatever their dtype.
        ignore_index: an id that marks tokens that do not exist either, such as -100; of K ids the
            entries, whose log-probs are 0 and have no gradient.
        return_entropy: also return the entropies, [...]. ``"detached"``: without a gradient.
        inplace_backward: let the backward write the gradient over the logits instead of into new
            memory. For those who know that nobody needs the logits any more: autograd raises
            where an op has saved them, not where a caller holds them. The logits must be
            contiguous, not negated (``torch._neg_view``) and no leaf, nor share the memory of one
            through a Python ``autograd.Function`` that returns its input detached; the same in C++
            is not seen. A second backward raises.
        group: the ranks among which the vocabulary is cut (tensor parallelism), a process group or
            a mesh of one dimension: ``logits`` is this rank's shard of the words, in the order of
            ranks, of any number each, even none; ids are those of all words, and everything else
            is the same on every rank. The result too, bit for bit. A few numbers a token travel, in
            one all-gather, and none in the backward, which gives each rank the gradient of its own
            logits: from a loss that all ranks compute alike, and that nobody sums over them. Ranks
            that do not agree raise the same error; on a GPU, under a group of NCCL alone, they get
            NaN, unless ``KLFAST_CHECK=1``. torch.compile breaks its graph here.
        backend: ``"auto"``, ``"native"``, ``"triton"`` or ``"reference"``: one asked for by name
            works or raises.

    Returns:
        The log-probs in the shape of ``token_ids``; with ``return_entropy``
        :class:`klfast.TokenLogprobs`.

    Raises:
        ValueError: a wrong shape, device, layout or value; the message names the argument. An id
            outside of [0, V) at a kept token is an error on a CPU, as is a temperature that is not
            > 0; on a GPU, where looking would need a sync, its log-prob is NaN unless
            ``KLFAST_CHECK=1``.
        TypeError: an argument of the wrong type or dtype.
        RuntimeError: the backend asked for cannot run here, and why; ranks of ``group`` that make
            other calls, or are gone.

    Warns once a process of [N, V] logits that look like log-probs of taken tokens, [B, T].

    Differentiable once: a second derivative raises in every backend but ``reference``. The backward
    reads log-probs and entropies again: autograd refuses it where they were changed in place.
    """
    arguments = (
        *(logits, token_ids, mask, ignore_index, temperature),
        *(return_entropy, inplace_backward),
    )
    args = args_of(token_logprobs_args, arguments, group, backend)
    outputs = backends.rows(backend, args)
    hints.of_call("token_logprobs", logits, mask=mask)
    return outputs.of_tokens()


class DivergenceOptions(TypedDict, total=False):
    """The options of every divergence over a vocabulary that change no type."""

    direction: DirectionName
    jsd_beta: float
    temperature: Temperature
    reduction: ReductionName
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
    temperature: Temperature = 1.0,
    token_ids: Tensor | None = None,
    return_entropy: ReturnEntropy = False,
    reduction: ReductionName = "none",
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    coef: Coefficient = 1.0,
    return_stats: bool = False,
    group: Group | None = None,
    backend: BackendName = "auto",
) -> Tensor | KLDivergence:
    """``coef`` times the reduced exact divergence of a policy and a reference, in nats.

    With p = softmax(logits / temperature) and q = softmax(ref_logits / temperature), per kept token
    ``mask * D``, where D sums over the vocabulary:

    ========== ====================================================================================
    direction  D
    ========== ====================================================================================
    reverse    KL(p || q) = sum p log(p / q): what the estimators of :func:`kl_penalty` estimate
    forward    KL(q || p) = sum q log(q / p)
    jsd        (1 - b) KL(p || m) + b KL(q || m), m = (1 - b) p + b q, b = ``jsd_beta``
    ========== ====================================================================================

    A word of probability 0 (a logit of -inf) adds 0; D is infinite where the other model excludes
    what the first may say. Both logits are read once (twice for ``jsd``, and in the rare row whose
    first words say nothing of the others), and nothing of their size is made but gradients. For
    scalar reductions these come out of the forward's read, unless ``token_ids`` or
    ``return_entropy`` is given, the logits are fp16, or torch.compile or torch.func traces;
    otherwise backward reads a second time.
    Finite logits of any size serve; a log-ratio beyond the arithmetic's largest number counts as
    that number in D, and has an infinite gradient. The jsd never exceeds its greatest value,
    ``-b log b - (1 - b) log(1 - b)``.
    D is accurate near 0: relative error 2e-6 at 5e-7 nats in fp32, never negative, exactly 0 for
    equal logits. Arithmetic and results are fp32 whatever the inputs' dtypes (fp64 if one is fp64).

    Args:
        logits: of the policy, [B, T, V], or packed [N, V] with ``cu_seqlens``; [N, V] without it is
            one sequence. fp64, fp32, bf16 or fp16, any strides; any V >= 1.
        ref_logits: of the reference; may differ in dtype. Gradients reach ``logits``, and
            ``ref_logits`` if it requires them, in their own dtype.
        mask: [B, T] or [N], which tokens exist, and their weights, as in :func:`kl_penalty`: rows
            of masked tokens are not read.
        direction: see above.
        jsd_beta: b, the reference's weight in the mixture, between 0 and 1.
        temperature: of both, as in :func:`token_logprobs`.
        token_ids: [B, T] or [N], any integer dtype: also return the log-probs of these tokens under
            both models, from the same read, each with its gradient; 0 where masked.
        return_entropy: also return the entropies of the policy, ``-sum p log p``, [B, T] or [N]
            whatever the reduction, from the same read, with their gradient to ``logits``, as
            :func:`token_logprobs` returns them: ``mask`` only leaves tokens out, and ``coef``
            does not scale them. NaN where D is. ``"detached"``: without a gradient.
        reduction: as in :func:`kl_penalty`, like the next three.
        cu_seqlens: see there.
        normalizer: see there; under DDP and FSDP :func:`klfast.data_parallel_normalizer`.
        coef: see there.
        return_stats: also return :class:`klfast.KLStats`; ``kl`` is the sum of ``mask * D``.
        group: the ranks of a vocabulary that is cut, as in :func:`token_logprobs`: both logits are
            this rank's shards. Not for ``jsd``, whose mixture has another weight in each shard: it
            is no sum over shards.
        backend: ``"auto"``, ``"native"``, ``"triton"`` or ``"reference"``: one asked for by name
            works or raises.

    Returns:
        The divergence; where anything else is asked for, :class:`klfast.KLDivergence`, with None
        for what was not.

    Raises:
        ValueError: a wrong shape, device, layout, choice or value; the message names the argument.
            Values of GPU tensors are checked under ``KLFAST_CHECK=1`` alone, as that needs a sync.
        TypeError: an argument of the wrong type or dtype.
        RuntimeError: the backend asked for cannot run here, and why; ranks of ``group`` that make
            other calls, or are gone.

    Warns once a process each: of [N, V] logits that look like log-probs of taken tokens, [B, T]; of
    [N, V] logits without ``cu_seqlens`` under a reduction by sequences.

    Differentiable once: a second derivative raises in every backend but ``reference``.

    On a CPU the gradient of a word that has more than half of the probability is minus the sum of
    all others, so that it keeps its digits at any margin. On a GPU it is off by up to 1e-3 at
    margins of 17 nats, and by all of itself at 25: there p is 1 less what fp32 does not hold.

    Source of ``jsd``: R. Agarwal et al., "On-Policy Distillation of Language Models" (2024,
    arXiv:2306.13649), section 2, with the reference as the teacher.
    """
    reducing = Reducing(reduction, cu_seqlens, normalizer, coef, return_stats)
    arguments = (
        *(logits, ref_logits, mask, direction, jsd_beta, temperature, token_ids, return_entropy),
        reducing,
    )
    args = args_of(kl_divergence_args, arguments, group, backend)
    outputs = backends.rows(backend, args)
    tensors = logits, ref_logits
    hints.of_call(args.function, *tensors, mask=mask, reduction=reduction, cu_seqlens=cu_seqlens)
    return outputs.of_divergence(token_ids is not None or bool(return_entropy) or return_stats)


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
    temperature: Temperature = 1.0,
    reduction: ReductionName = "none",
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    coef: Coefficient = 1.0,
    return_stats: bool = False,
    group: Group | None = None,
    backend: BackendName = "auto",
) -> Tensor | KLDivergence:
    """``coef`` times the reduced divergence of a student from a teacher's K words a token, in nats.

    The teacher p is known by its log-probs at K words, as an inference server returns them. With q
    = softmax(logits / temperature), P and Q the sums of p and q over a token's words, per kept
    token ``mask * D``:

    =============== ====================================================== =========================
    tail            what D compares                                        property
    =============== ====================================================== =========================
    ``bucket``      K + 1 categories; the last holds 1 - P and 1 - Q       >= 0, and at most the
                                                                           divergence of all words
    ``renormalize`` p / P and q / Q                                        >= 0; of one word 0
    ``generalized`` p and q, by the terms x log(x / y) - x + y             >= 0
    ``drop``        p and q, by the terms x log(x / y)                     may be negative
    =============== ====================================================== =========================

    ========= =====================================================================================
    direction D
    ========= =====================================================================================
    forward   the sum over words of terms in x = p, y = q: KL(p || q), the teacher's expectation
    reverse   the sum in x = q, y = p: KL(q || p)
    jsd       (1 - b) of the terms of (q, m) plus b of those of (p, m), with m = (1 - b) q + b p and
              b = ``jsd_beta``
    ========= =====================================================================================

    The student's log-probs come from one read of the logits, and nothing of their size is made but
    the gradient, in the backward's second read. What follows of [tokens, K] numbers is fp64; the
    result is fp32 (fp64 for fp64 logits). A tail 1 - Q keeps its digits and its gradient up to
    Q = 1 - 2^-24, and is never less than 2^-24, as is 1 - P of log-probs that sum to 1 or more.

    Args:
        logits: of the student, [B, T, V], or packed [N, V] with ``cu_seqlens``, as in
            :func:`kl_divergence`.
        ref_token_ids: [B, T, K] or [N, K], K >= 1, any integer dtype: the teacher's words, in any
            order, each once a token. Any words serve, such as the student's own likeliest.
        ref_logprobs: [B, T, K] or [N, K], the teacher's log-probs there; fp64, fp32, bf16 or fp16.
            -inf says that an entry does not exist: its id is not read. A token without any is left
            out as if masked, in numerator and denominator. Gradients reach them if they require it.
        mask: [B, T] or [N], as in :func:`kl_penalty`.
        direction: see above.
        tail: see above.
        jsd_beta: b, the teacher's weight in the mixture, between 0 and 1.
        temperature: of the student, as in :func:`token_logprobs`. Of the teacher too under
            ``"renormalize"`` alone: elsewhere its tail would be another one, which nobody knows.
        reduction: as in :func:`kl_penalty`, like the next three.
        cu_seqlens: see there.
        normalizer: see there.
        coef: see there.
        return_stats: also return :class:`klfast.KLStats`; ``kl`` is the sum of ``mask * D``.
        group: the ranks of a vocabulary that is cut, as in :func:`token_logprobs`: ``logits`` is
            this rank's shard, and ``ref_token_ids`` are ids of the whole vocabulary. It serves
            ``"jsd"`` too, which needs the student's log-probs at the entries alone.
        backend: ``"auto"``, ``"native"``, ``"triton"`` or ``"reference"``: one asked for by name
            works or raises.

    Returns:
        The divergence; with ``return_stats`` :class:`klfast.KLDivergence`.

    Raises:
        ValueError: a wrong shape, device, layout, choice or value; the message names the argument.
            A word outside of [0, V), and one that a token has twice, is an error on a CPU; on a
            GPU, where looking would need a sync, the first makes NaN and the second counts twice,
            unless ``KLFAST_CHECK=1``. ``"renormalize"`` of one entry a token, which is always 0.
        TypeError: an argument of the wrong type or dtype.
        RuntimeError: the backend asked for cannot run here, and why; ranks of ``group`` that make
            other calls, or are gone.

    Warns once a process of ``ref_logprobs`` above 0, which look like logits.

    Differentiable once: a second derivative raises in every backend but ``reference``.

    Sources: ``bucket`` and ``drop`` as in TRL's and verl's distillation; ``generalized``: MOPD
    (2026, arXiv:2606.30406).
    """
    reducing = Reducing(reduction, cu_seqlens, normalizer, coef, return_stats)
    arguments = (
        *(logits, ref_token_ids, ref_logprobs, mask, direction, tail, jsd_beta, temperature),
        reducing,
    )
    args = args_of(topk_args, arguments, group, backend)
    outputs = backends.rows(backend, args)
    tensors = logits, ref_logprobs[..., 0]
    hints.of_call(args.function, *tensors, mask=mask, reduction=reduction, cu_seqlens=cu_seqlens)
    return outputs.of_divergence(return_stats)
