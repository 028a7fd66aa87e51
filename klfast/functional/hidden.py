"""The public functions from hidden states: validate, choose a backend, compute.

Shapes: B sequences of T tokens, or N packed tokens, with hidden size D and vocabulary size V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from klfast.args.checks import Coefficient
from klfast.args.heads import Hidden, Loss, Softcap, check_scalar
from klfast.args.keywords import explains_keywords
from klfast.args.logits import Chosen, Temperature
from klfast.args.penalty import Reducing
from klfast.args.rows import RowsArgs, Teacher
from klfast.args.signature import Tokens
from klfast.autograd.chunks import breaks_graphs
from klfast.functional.logits import DivergenceOptions, agreed_outputs
from klfast.functional.rank_check import telling
from klfast.stats.outputs import KLDivergence, TokenLogprobs, TokenLoss
from klfast.types.names import BackendName, DirectionName, ReductionName, ReturnEntropy, TailName

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from klfast.functional.rank_check import Group


class _TokenOptions(TypedDict, total=False):
    """The options of ``linear_token_logprobs`` that change no type."""

    bias: Tensor | None
    softcap: float | None
    temperature: Temperature
    chunk: int | Literal["auto"]
    group: Group | None
    backend: BackendName


@overload
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[_TokenOptions],
) -> Tensor: ...


@overload
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    return_entropy: Literal[True, "detached"],
    **options: Unpack[_TokenOptions],
) -> TokenLogprobs: ...


@overload
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    return_entropy: ReturnEntropy,
    **options: Unpack[_TokenOptions],
) -> Tensor | TokenLogprobs: ...


@breaks_graphs
@explains_keywords
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: Temperature = 1.0,
    return_entropy: ReturnEntropy = False,
    chunk: int | Literal["auto"] = "auto",
    group: Group | None = None,
    backend: BackendName = "auto",
) -> Tensor | TokenLogprobs:
    """Log-probs of tokens from a model's hidden states, in nats, without the logits of the batch.

    The function computes :func:`klfast.token_logprobs` of ``logits = softcap(hidden @ weight.T +
    bias)``. The logits of ``chunk`` tokens exist at a time. They are fp32 for any dtypes of hidden
    states and weight (fp64 if one is fp64). They are not rounded to bf16, because this would change
    a log-prob by up to 0.1 nats.

    ====================== ======= =================================================================
    differentiated inputs  matmuls held until the backward
    ====================== ======= =================================================================
    weight or bias         4       the hidden states (the backward computes the logits again)
    hidden states alone    2       a vector [D] per token for the log-probs, and a second for the
                                   entropies, which take one more matmul (LoRA, frozen head)
    ====================== ======= =================================================================

    Each matmul has chunk x D x V multiplications per chunk. Besides inputs and gradients, the
    function needs memory for the fp32 logits of a chunk, and twice as much with a softcap or a
    frozen head. Entropies that are only logged need no gradient.
    ``return_entropy="detached"`` saves their matmul and their vectors.

    Args:
        hidden: [..., D], the hidden states before the head; fp64, fp32, bf16 or fp16, any strides.
            Gradients reach ``hidden``, ``weight`` and ``bias`` in their own dtypes.
        weight: [V, D], the weight of the head; may differ in dtype. Its gradient is summed in fp32
            over all tokens, and rounded once. A DTensor, such as FSDP2's, is gathered once, and its
            gradient is averaged over the ranks.
        token_ids: [...] or [..., K], as in :func:`klfast.token_logprobs`.
        mask: [...], as in :func:`klfast.token_logprobs`. Tokens with a mask of 0 enter no matmul.
        bias: [V], added to the logits.
        softcap: c > 0. ``c * tanh(logits / c)`` replaces the logits.
        temperature: as in :func:`klfast.token_logprobs`. It applies after the softcap. To multiply
            the logits by a factor, pass the reciprocal of the factor.
        return_entropy: also return the entropies, [...]. ``"detached"`` returns them without a
            gradient, for logs. They then take no matmul, and nothing is held for them.
        chunk: tokens at a time. ``"auto"`` takes the power of two from 16 to 4,096 whose fp32
            logits are nearest to 64 MiB (600 MiB on a GPU). With a number every chunk has that many
            rows of logits, at least 16. Zeros fill the last chunk up, so a token's log-prob (not
            its gradient) has the same bits whatever else is in the batch. A number above 4,096 only
            bounds the tokens at a time, and no chunk is filled up.
        group: the ranks that share the vocabulary, as in :func:`klfast.token_logprobs`. ``weight``
            and ``bias`` are this rank's vocabulary entries, as plain tensors. Everything else is
            the same on every rank. A group adds no matmul. It sends a few values per token for each
            chunk, and adds up the gradient of ``hidden`` over the ranks once, in fp32.
        backend: ``"auto"``, ``"native"``, ``"triton"`` or ``"reference"``. The reference holds the
            logits of all tokens in fp64.

    Returns:
        The log-probs in the shape of ``token_ids``; with ``return_entropy``
        :class:`klfast.TokenLogprobs`.

    Raises:
        ValueError: a wrong shape, device, layout or value; the message names the argument. Values
            are checked as in :func:`klfast.token_logprobs`, before any matmul.
        TypeError: an argument of the wrong type or dtype, and hidden states in a DTensor.
        RuntimeError: the backend asked for cannot run here (the message says why), a torch.func
            transform (only ``reference`` supports them), or ranks of ``group`` that make other
            calls or are gone. The backward raises if a tensor that it reads again has another shape
            or storage than in the forward. With DeepSpeed ZeRO-3, keep
            ``deepspeed.zero.GatheredParameters`` open around the forward and the backward. New
            values in the same storage are detected only where autograd detects them. FSDP,
            offloading and checkpoints need nothing.

    Autocast converts hidden states, weight and bias to its dtype, as for a linear layer.
    torch.compile breaks the graph at a call. On a GPU a mask costs one sync, for the number of
    tokens it keeps. While a CUDA graph is captured, masked tokens enter the matmuls instead.

    Differentiable once: a second derivative raises in every backend but ``reference``.

    Source: klfast's own. E. Wijmans et al. showed for cross-entropy that the logits of a batch need
    not be held, "Cut Your Losses in Large-Vocabulary Language Models" (2024, arXiv:2411.09009).
    """
    with telling(group, may_wait=True):
        tokens = Tokens.of("linear_token_logprobs", hidden, of_shard=group is not None)
        args = RowsArgs.of(
            tokens,
            Hidden.of(tokens, weight, bias, softcap, chunk),
            mask=mask,
            temperature=temperature,
            token_ids=token_ids,
            return_entropy=return_entropy,
        )
    return agreed_outputs(args, group, backend).of_tokens()


@explains_keywords
@breaks_graphs
def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    loss: Callable[..., Tensor],
    mask: Tensor | None = None,
    *,
    inputs: Sequence[Tensor] = (),
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: Temperature = 1.0,
    weights: Tensor | None = None,
    reduction: ReductionName = "token-mean",
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    return_entropy: ReturnEntropy = False,
    chunk: int | Literal["auto"] = "auto",
    group: Group | None = None,
    backend: BackendName = "auto",
) -> TokenLoss:
    """The reduced value of any loss per token, from hidden states, in three matmuls.

    ``loss`` is your function of log-probs in nats, such as GRPO, DAPO or CISPO with a KL. klfast
    computes ``reduce(loss(logprobs, *inputs), mask, reduction=...)`` with the ``logprobs`` of
    :func:`linear_token_logprobs`. The forward computes the gradient too, so no logits are computed
    twice:

    ====================== ======= =================================================================
    differentiated inputs  matmuls held until the backward
    ====================== ======= =================================================================
    weight or bias         3       the gradients, which the forward computes
    hidden states alone    2       the same (LoRA, frozen head)
    none                   1       nothing
    ====================== ======= =================================================================

    Each matmul has chunk x D x V multiplications per chunk. Besides inputs and gradients, the
    function needs memory for the fp32 logits of a chunk, and twice as much with a softcap.

    Args:
        hidden: [B, T, D], or packed [N, D] with ``cu_seqlens``; [N, D] without it is one sequence.
            Dtypes and gradients as in :func:`linear_token_logprobs`.
        weight: [V, D], as in :func:`linear_token_logprobs`.
        token_ids: [B, T] or [N], the tokens whose log-probs the loss takes.
        loss: a function that klfast calls once for each chunk of n kept tokens. It gets their
            log-probs [n] in fp32 (fp64 if an input is fp64), and the same tokens of each tensor in
            ``inputs``, [n]. It returns a loss per token, [n], and may call :func:`kl_penalty`. It
            must treat each token alone, and must not depend on another tensor that requires a
            gradient. For a loss over sequences, use :func:`linear_token_logprobs`.
        mask: [B, T] or [N], as in :func:`kl_penalty`. Tokens with a mask of 0 reach neither a
            matmul nor ``loss``.
        inputs: the constants of ``loss``, such as ``old_logprobs`` and ``advantages``. Each has the
            shape of ``token_ids``, or broadcasts to it, such as [B, 1].
        bias, softcap, temperature: as in :func:`linear_token_logprobs`.
        weights: as in :func:`kl_penalty`. They multiply the losses. A loss of weight 0 may be NaN.
        reduction: a reduction of :func:`kl_penalty` to a scalar.
        cu_seqlens, normalizer: as in :func:`kl_penalty`.
        return_entropy: also return the entropies, [B, T] or [N], without a gradient.
        chunk: as in :func:`linear_token_logprobs`. ``"auto"`` takes twice as many tokens, the
            memory of :func:`linear_kl_divergence`, which has two models' logits.
        group: as in :func:`linear_token_logprobs`. Every rank calls ``loss`` with the same
            log-probs, and must return the same losses.
        backend: as there. The reference calls ``loss`` once, with all kept tokens.

    Returns:
        :class:`klfast.TokenLoss`. Only ``loss`` has a gradient.

    Raises:
        ValueError: a wrong shape, device, layout, choice or value; the message names the argument.
            ``loss`` raises it for another shape than [n], for a tensor that requires a gradient,
            and, where values are checked, for NaN at a token whose log-prob is finite.
        TypeError: an argument or a result of ``loss`` of the wrong type or dtype.
        RuntimeError: as in :func:`linear_token_logprobs`, and a second backward without
            ``retain_graph=True`` in the first.

    With the same number as ``chunk``, log-probs have the bits of :func:`linear_token_logprobs`.
    Autocast, torch.compile and second derivatives: as there. While a CUDA graph is captured, masked
    tokens reach ``loss`` too, with a log-prob of 0, and their losses are ignored.

    Source: klfast's own. P.-L. Hsu et al. compute the gradient of cross-entropy in the forward,
    "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024, arXiv:2410.10989).
    """
    with telling(group, may_wait=True):
        check_scalar(reduction, is_normalized=normalizer is not None)
        tokens = Tokens.of("linear_token_loss", hidden, cu_seqlens, of_shard=group is not None)
        tokens.check(token_ids=token_ids)
        args = RowsArgs.of(
            tokens,
            Hidden.of(tokens, weight, bias, softcap, chunk),
            mask=mask,
            temperature=temperature,
            token_ids=token_ids,
            return_entropy=return_entropy,
            loss=Loss.of(loss, inputs, token_ids),
            reducing=Reducing(reduction, weights, cu_seqlens, normalizer),
        )
    return agreed_outputs(args, group, backend).of_loss()


class _DivergenceOptions(DivergenceOptions, total=False):
    bias: Tensor | None
    ref_bias: Tensor | None
    softcap: Softcap
    chunk: int | Literal["auto"]


@overload
def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    token_ids: None = None,
    return_entropy: Literal[False] = False,
    return_stats: Literal[False] = False,
    **options: Unpack[_DivergenceOptions],
) -> Tensor: ...


@overload
def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    token_ids: Tensor,
    return_entropy: ReturnEntropy = False,
    return_stats: bool = False,
    **options: Unpack[_DivergenceOptions],
) -> KLDivergence: ...


@overload
def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    return_entropy: Literal[True, "detached"],
    return_stats: bool = False,
    **options: Unpack[_DivergenceOptions],
) -> KLDivergence: ...


@overload
def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    return_entropy: ReturnEntropy = False,
    return_stats: Literal[True],
    **options: Unpack[_DivergenceOptions],
) -> KLDivergence: ...


@overload
def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    return_entropy: ReturnEntropy = False,
    return_stats: bool = False,
    **options: Unpack[_DivergenceOptions],
) -> Tensor | KLDivergence: ...


@breaks_graphs
@explains_keywords
def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    softcap: Softcap = None,
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
    chunk: int | Literal["auto"] = "auto",
    group: Group | None = None,
    backend: BackendName = "auto",
) -> Tensor | KLDivergence:
    """``coef`` times the reduced exact divergence of a policy and a reference, in nats, from both
    models' hidden states, without the logits of the batch.

    The function computes :func:`klfast.kl_divergence` of ``logits = softcap(hidden @ weight.T +
    bias)`` and ``ref_logits = softcap(ref_hidden @ ref_weight.T + ref_bias)``. The logits of
    ``chunk`` tokens exist at a time. They are fp32 for any dtypes of hidden states and weights
    (fp64 if one is fp64). bf16 logits would lose a KL of 1e-5 nats in their rounding. Here only the
    rounding of the matmuls remains.

    =========================== ======= ============================================================
    differentiated inputs       matmuls held until the backward
    =========================== ======= ============================================================
    scalar, trained head        4       the gradients, which the forward computes
    scalar, frozen head         3       the same
    per token, weight or bias   6       the hidden states (the backward computes the logits again)
    per token, hidden states    3       a vector [D] per token for the divergences, and others for
                                        log-probs and for entropies, each with one more matmul
    =========================== ======= ============================================================

    Each matmul has chunk x D x V multiplications per chunk. A differentiated reference takes as
    many more as the policy. ``token_ids`` and ``return_entropy`` give per-token values with every
    reduction. Besides inputs and gradients, the function needs memory for the fp32 logits of a
    chunk of both models. It needs the same amount again with a softcap, or if log-probs or
    entropies are differentiated.

    Args:
        hidden: hidden states of the policy, [B, T, D], or packed [N, D] with ``cu_seqlens``.
            [N, D] without it is one sequence. fp64, fp32, bf16 or fp16, any strides.
        weight: [V, D], the weight of the policy's head, as in :func:`linear_token_logprobs`.
        ref_hidden: hidden states of the reference for the same tokens, [B, T, D_ref] or
            [N, D_ref].
        ref_weight: [V, D_ref]. None means the policy's head and bias without their graph, so that
            no gradient reaches ``weight`` through the reference. Gradients reach ``ref_hidden``,
            ``ref_weight`` and ``ref_bias`` if these require them.
        mask: [B, T] or [N], as in :func:`kl_penalty`. Tokens with a mask of 0 enter no matmul.
        bias: [V], added to the policy's logits.
        ref_bias: [V], added to the reference's logits.
        softcap: c > 0 for both models, as in :func:`linear_token_logprobs`; or a pair (policy,
            reference), with None for no softcap.
        direction, jsd_beta, skew_alpha: as in :func:`klfast.kl_divergence`.
        temperature: of both models, as in :func:`klfast.token_logprobs`, after the softcap.
        token_ids: [B, T] or [N], or [..., K]. Also return the log-probs of these tokens under both
            models, each with its gradient. They are 0 where masked.
        return_entropy: also return the entropies of the policy, with their gradient.
            ``"detached"`` returns them without a gradient, as in :func:`linear_token_logprobs`. A
            scalar reduction then keeps its cost.
        reduction, weights, cu_seqlens, normalizer, coef: as in :func:`kl_penalty`.
        return_stats: also return :class:`klfast.KLStats`; ``kl`` is the sum of ``mask * D``. With K
            ids per token, its statistics of tokens are NaN.
        chunk, backend: as in :func:`linear_token_logprobs`.
        group: as in :func:`linear_token_logprobs`, for both heads. Only ``reverse`` and ``forward``
            accept it.

    Returns:
        The divergence. If you ask for anything else, :class:`klfast.KLDivergence`, with None for
        outputs that you did not ask for.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_token_logprobs`.

    Warns once per process about [N, D] hidden states without ``cu_seqlens`` under a reduction by
    sequences, and about a reference that requires a gradient while the policy does not.

    Autocast, torch.compile, CUDA graphs and second derivatives: as in
    :func:`linear_token_logprobs`.

    Source of ``jsd``: R. Agarwal et al., "On-Policy Distillation of Language Models" (2024,
    arXiv:2306.13649), section 2, with the reference as the teacher.
    """
    reducing = Reducing(reduction, weights, cu_seqlens, normalizer, coef, return_stats)
    of_shard, reference = group is not None, (ref_hidden, ref_weight, ref_bias)
    with telling(group, may_wait=True):
        chosen = Chosen.of(direction, jsd_beta, skew_alpha, of_shard=of_shard)
        tokens = Tokens.of("linear_kl_divergence", hidden, cu_seqlens, of_shard=of_shard)
        args = RowsArgs.of(
            tokens,
            Hidden.of(tokens, weight, bias, softcap, chunk, reference, chosen),
            mask=mask,
            temperature=temperature,
            token_ids=token_ids,
            return_entropy=return_entropy,
            chosen=chosen,
            reducing=reducing,
        )
    outputs = agreed_outputs(args, group, backend, hidden, ref_hidden, mask=mask, reducing=reducing)
    return outputs.of_divergence()


class _TopKOptions(DivergenceOptions, total=False):
    bias: Tensor | None
    softcap: float | None
    tail: TailName
    chunk: int | Literal["auto"]


@overload
def linear_topk_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[_TopKOptions],
) -> Tensor: ...


@overload
def linear_topk_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: Literal[True],
    **options: Unpack[_TopKOptions],
) -> KLDivergence: ...


@overload
def linear_topk_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    return_stats: bool,
    **options: Unpack[_TopKOptions],
) -> Tensor | KLDivergence: ...


@breaks_graphs
@explains_keywords
def linear_topk_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
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
    chunk: int | Literal["auto"] = "auto",
    group: Group | None = None,
    backend: BackendName = "auto",
) -> Tensor | KLDivergence:
    """``coef`` times the reduced divergence of a student from a teacher's top-K log-probs, in nats,
    from the student's hidden states, without the logits of the batch.

    The function computes :func:`klfast.topk_kl_divergence` of ``logits = softcap(hidden @ weight.T
    + bias)``. See that function for the tables of tails and directions. The logits of ``chunk``
    tokens exist at a time, in fp32 (fp64 if an input is fp64). The function computes the student's
    log-probs with :func:`linear_token_logprobs`, and has its time and memory with K ids per token.

    Args:
        hidden: hidden states of the student, [B, T, D], or packed [N, D] with ``cu_seqlens``.
            [N, D] without it is one sequence. fp64, fp32, bf16 or fp16, any strides.
        weight: [V, D], the weight of the student's head, as in :func:`linear_token_logprobs`.
            Gradients reach ``hidden``, ``weight`` and ``bias``, and ``ref_logprobs`` if it requires
            them.
        ref_token_ids, ref_logprobs: [B, T, K] or [N, K], the teacher's token ids and their
            log-probs, as in :func:`klfast.topk_kl_divergence`.
        mask: [B, T] or [N], as in :func:`kl_penalty`. Masked tokens enter no matmul.
        bias: [V], added to the logits.
        softcap: c > 0, as in :func:`linear_token_logprobs`.
        direction, tail, jsd_beta, skew_alpha: as in :func:`klfast.topk_kl_divergence`.
        temperature: as there. It applies after the softcap.
        reduction, weights, cu_seqlens, normalizer, coef: as in :func:`kl_penalty`.
        return_stats: also return :class:`klfast.KLStats`; ``kl`` is the sum of ``mask * D``.
        chunk, backend: as in :func:`linear_token_logprobs`.
        group: as there. Every ``direction`` accepts it. ``ref_token_ids`` are ids of the whole
            vocabulary.

    Returns:
        The divergence; with ``return_stats`` :class:`klfast.KLDivergence`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`klfast.topk_kl_divergence` and
            :func:`linear_token_logprobs`.

    Warns once per process about ``ref_logprobs`` as :func:`topk_kl_divergence` does.

    Autocast, torch.compile, CUDA graphs and second derivatives: as in
    :func:`linear_token_logprobs`.

    Sources: ``bucket`` and ``drop`` are from TRL's and verl's distillation, ``generalized`` from
    MOPD (2026, arXiv:2606.30406).
    """
    reducing = Reducing(reduction, weights, cu_seqlens, normalizer, coef, return_stats)
    with telling(group, may_wait=True):
        chosen = Chosen.of(direction, jsd_beta, skew_alpha)
        of_shard = group is not None
        tokens = Tokens.of("linear_topk_kl_divergence", hidden, cu_seqlens, of_shard=of_shard)
        args = RowsArgs.of(
            tokens,
            Hidden.of(tokens, weight, bias, softcap, chunk),
            mask=mask,
            temperature=temperature,
            teacher=Teacher.of(tokens, ref_token_ids, ref_logprobs, chosen, tail),
            reducing=reducing,
        )
    outputs = agreed_outputs(
        args, group, backend, hidden, ref_logprobs, mask=mask, reducing=reducing
    )
    return outputs.of_divergence()
