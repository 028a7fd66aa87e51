"""The public functions from hidden states: validate, choose a backend, compute.

Shapes: B sequences of T tokens, or N packed tokens, of width D; V words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from klfast import backends
from klfast.args.checks import Coefficient
from klfast.args.heads import Softcap
from klfast.args.hidden import (
    linear_kl_divergence_args,
    linear_token_logprobs_args,
    linear_topk_args,
)
from klfast.args.logits import Temperature
from klfast.args.rows import Reducing
from klfast.autograd.chunks import breaks_graphs
from klfast.functional import hints
from klfast.functional.dtensor import refuse_dtensors
from klfast.functional.logits import DivergenceOptions
from klfast.functional.rank_check import args_of
from klfast.stats.outputs import KLDivergence, TokenLogprobs
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

    :func:`klfast.token_logprobs` of ``logits = softcap(hidden @ weight.T + bias)``, of which those
    of ``chunk`` tokens are there at a time. They are fp32 whatever the dtypes of hidden states and
    weight (fp64 if one of these is), and are not rounded to bf16, which would move a log-prob by up
    to 0.1 nats.

    ========================= ============ =========================================================
    what is differentiated    products     what is held until the backward
    ========================= ============ =========================================================
    weight or bias            4            the hidden states; the backward makes the logits again
    hidden states alone       2            a vector [D] a token for the log-probs, and another for
    (a frozen head: LoRA)                  the entropies, which takes one product more
    ========================= ============ =========================================================

    A product is one of chunk x D x V multiplications a chunk. Memory beside inputs and gradients:
    the fp32 logits of a chunk, twice with a softcap, and under a frozen head. Entropies that are
    only logged need no gradient: ``return_entropy="detached"`` saves their product and vectors.

    Args:
        hidden: [..., D], the hidden states before the head; fp64, fp32, bf16 or fp16, any strides.
            Gradients reach ``hidden``, ``weight`` and ``bias`` in their own dtypes.
        weight: [V, D], of the head; may differ in dtype. Its gradient is summed in fp32 over all
            tokens, and rounded once. A DTensor, as of FSDP2, is made whole once, and its gradient
            averaged over the ranks.
        token_ids: [...] or [..., K], as in :func:`klfast.token_logprobs`.
        mask: [...], as there: tokens of a mask's 0 enter no product.
        bias: [V], added to the logits.
        softcap: c > 0: ``c * tanh(logits / c)`` takes the place of the logits.
        temperature: as in :func:`klfast.token_logprobs`; it acts behind the softcap. A factor of
            the logits is its reciprocal.
        return_entropy: also return the entropies, [...]. ``"detached"``: without a gradient, for
            entropies that are only logged. They take no matmul, and nothing is held for them.
        chunk: tokens at a time. ``"auto"``: the power of two within 16 and 4,096 whose fp32 logits
            are nearest to 64 MiB (600 MiB on a GPU). With a number every product has that many
            rows, those of the last chunk filled up with zeros, and a token's log-prob has the same
            bits whatever else is in the batch. A number above 4,096 only bounds the tokens at a
            time, and fills up nothing.
        group: the ranks among which the vocabulary is cut, as in :func:`klfast.token_logprobs`:
            ``weight`` and ``bias`` are this rank's words, plain tensors; all else is the same on
            every rank. No product is added. A few numbers a token travel, per chunk, and the
            gradient of ``hidden`` is added up over the ranks, in fp32, once.
        backend: ``"auto"``, ``"native"``, ``"triton"`` or ``"reference"``, which holds the logits
            of all tokens in fp64.

    Returns:
        The log-probs in the shape of ``token_ids``; with ``return_entropy``
        :class:`klfast.TokenLogprobs`.

    Raises:
        ValueError: a wrong shape, device, layout or value; the message names the argument. Values
            are checked as in :func:`klfast.token_logprobs`, before any product is made.
        TypeError: an argument of the wrong type or dtype, and hidden states in a DTensor.
        RuntimeError: the backend asked for cannot run here, and why; torch.func transforms, which
            ``reference`` alone serves; ranks of ``group`` that make other calls, or are gone. In
            the backward: a tensor that it reads again has another shape or storage than in the
            forward. Keep ``deepspeed.zero.GatheredParameters`` open around the forward and the
            backward under DeepSpeed ZeRO-3. New values in the same storage are not seen where
            autograd does not see them. FSDP, offloading and checkpoints need nothing.

    Under autocast, hidden states, weight and bias are taken in its dtype, as a linear layer takes
    them. torch.compile breaks the graph at a call. On a GPU a mask costs one sync, for the number
    of tokens it keeps; while a CUDA graph is captured masked tokens enter the products instead.

    Differentiable once: a second derivative raises in every backend but ``reference``.

    Source: klfast's own; that the logits of a batch need not be held is known of cross-entropy from
    E. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024,
    arXiv:2411.09009).
    """
    refuse_dtensors(hidden=hidden, token_ids=token_ids, mask=mask)
    arguments = (
        *(hidden, weight, token_ids, mask, bias, softcap),
        *(temperature, return_entropy, chunk),
    )
    args = args_of(linear_token_logprobs_args, arguments, group, backend, may_wait=True)
    return backends.rows(backend, args).of_tokens()


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
    temperature: Temperature = 1.0,
    token_ids: Tensor | None = None,
    return_entropy: ReturnEntropy = False,
    reduction: ReductionName = "none",
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

    :func:`klfast.kl_divergence` of ``logits = softcap(hidden @ weight.T + bias)`` and ``ref_logits
    = softcap(ref_hidden @ ref_weight.T + ref_bias)``, of which those of ``chunk`` tokens are there
    at a time. They are fp32 whatever the dtypes of hidden states and weights (fp64 if one of these
    is): a KL of 1e-5 nats, which logits in bf16 drown in their rounding, is left with that of the
    products.

    ============================ ========= =========================================================
    what is differentiated       products  what is held until the backward
    ============================ ========= =========================================================
    a scalar: of a trained head  4         the gradients, which the forward makes
    a scalar: of a frozen head   3         the same
    numbers per token: weight    6         the hidden states; the backward makes the logits again
    or bias
    numbers per token: hidden    3         a vector [D] a token for the divergences, and others for
    states alone (LoRA)                    log-probs and for entropies, which take one product more
                                           each
    ============================ ========= =========================================================

    A product is one of chunk x D x V multiplications a chunk. Where the reference is differentiated
    too, it takes as many more as the policy. ``token_ids`` and ``return_entropy`` are numbers per
    token, whatever the reduction. Memory beside inputs and gradients: the fp32 logits of a chunk of
    both models; once more with a softcap, or where log-probs or entropies are differentiated.

    Args:
        hidden: of the policy, [B, T, D], or packed [N, D] with ``cu_seqlens``; [N, D] without it is
            one sequence. fp64, fp32, bf16 or fp16, any strides.
        weight: [V, D], of the policy's head, as in :func:`linear_token_logprobs`.
        ref_hidden: of the reference, [B, T, D_ref] or [N, D_ref], of the same tokens.
        ref_weight: [V, D_ref]; None is the policy's head without its graph, the bias with it:
            nothing flows to ``weight`` by way of the reference. Gradients reach ``ref_hidden``,
            ``ref_weight`` and ``ref_bias`` where these require them.
        mask: [B, T] or [N], as in :func:`kl_penalty`: tokens of a mask's 0 enter no product.
        bias: [V], added to the policy's logits.
        ref_bias: [V], added to the reference's.
        softcap: c > 0, as in :func:`linear_token_logprobs`, of both models; or (the policy's, the
            reference's), None where there is none.
        direction: as in :func:`klfast.kl_divergence`, like the next one.
        jsd_beta: see there.
        temperature: of both, as in :func:`klfast.token_logprobs`, behind the softcap.
        token_ids: [B, T] or [N], or [..., K]: also return the log-probs of these tokens under both
            models, each with its gradient; 0 where masked.
        return_entropy: also return the entropies of the policy, with their gradient.
            ``"detached"``: without a gradient, as in :func:`linear_token_logprobs`. A scalar then
            keeps the costs of a scalar.
        reduction: as in :func:`kl_penalty`, like the next three.
        cu_seqlens: see there.
        normalizer: see there; under DDP and FSDP :func:`klfast.data_parallel_normalizer`.
        coef: see there.
        return_stats: also return :class:`klfast.KLStats`; ``kl`` is the sum of ``mask * D``. What
            it says of tokens is NaN where K ids a token are given.
        chunk: as in :func:`linear_token_logprobs`.
        group: not for ``jsd``; else as in :func:`linear_token_logprobs`, of both heads.
        backend: see there.

    Returns:
        The divergence; where anything else is asked for, :class:`klfast.KLDivergence`, with None
        for what was not.

    Raises:
        ValueError: a wrong shape, device, layout, choice or value; the message names the argument.
            Values are checked as in :func:`klfast.kl_divergence`, before any product is made.
        TypeError: an argument of the wrong type or dtype, and hidden states in a DTensor.
        RuntimeError: the backend asked for cannot run here, and why; torch.func transforms, which
            ``reference`` alone serves; in the backward a tensor that changed, as in
            :func:`linear_token_logprobs`.

    Warns once a process of [N, D] hidden states without ``cu_seqlens`` under a reduction by
    sequences, and of a reference that requires a gradient where the policy does not.

    Autocast, torch.compile, CUDA graphs and second derivatives: as in
    :func:`linear_token_logprobs`.

    Source of ``jsd``: R. Agarwal et al., "On-Policy Distillation of Language Models" (2024,
    arXiv:2306.13649), section 2, with the reference as the teacher.
    """
    refuse_dtensors(
        hidden=hidden, ref_hidden=ref_hidden, mask=mask, token_ids=token_ids, cu_seqlens=cu_seqlens
    )
    arguments = (
        *(hidden, weight, ref_hidden, ref_weight, mask, bias, ref_bias, softcap, direction),
        *(jsd_beta, temperature, token_ids, return_entropy),
        Reducing(reduction, cu_seqlens, normalizer, coef, return_stats),
        chunk,
    )
    args = args_of(linear_kl_divergence_args, arguments, group, backend, may_wait=True)
    outputs = backends.rows(backend, args)
    tensors = hidden, ref_hidden
    hints.of_call(args.function, *tensors, reduction=reduction, cu_seqlens=cu_seqlens)
    return outputs.of_divergence(token_ids is not None or bool(return_entropy) or return_stats)


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
    temperature: Temperature = 1.0,
    reduction: ReductionName = "none",
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

    :func:`klfast.topk_kl_divergence` of ``logits = softcap(hidden @ weight.T + bias)``. The logits
    of ``chunk`` tokens exist at a time, in fp32 (fp64 if an input is). The tables of tails and
    directions are there. Time and memory are those of :func:`linear_token_logprobs` with K ids a
    token, which computes the student's log-probs.

    Args:
        hidden: of the student, [B, T, D], or packed [N, D] with ``cu_seqlens``; [N, D] without it
            is one sequence. fp64, fp32, bf16 or fp16, any strides.
        weight: [V, D], of the student's head, as in :func:`linear_token_logprobs`. Gradients reach
            ``hidden``, ``weight`` and ``bias``, and ``ref_logprobs`` if it requires them.
        ref_token_ids: [B, T, K] or [N, K], the teacher's token ids, as in
            :func:`klfast.topk_kl_divergence`, like the next one.
        ref_logprobs: [B, T, K] or [N, K], the teacher's log-probs there.
        mask: [B, T] or [N], as in :func:`kl_penalty`: masked tokens enter no matmul.
        bias: [V], added to the logits.
        softcap: c > 0, as in :func:`linear_token_logprobs`.
        direction: as in :func:`klfast.topk_kl_divergence`, like the next three.
        tail: see there.
        jsd_beta: see there.
        temperature: see there; it acts behind the softcap.
        reduction: as in :func:`kl_penalty`, like the next three.
        cu_seqlens: see there.
        normalizer: see there.
        coef: see there.
        return_stats: also return :class:`klfast.KLStats`; ``kl`` is the sum of ``mask * D``.
        chunk: as in :func:`linear_token_logprobs`.
        group: see there; ``"jsd"`` is served too. ``ref_token_ids`` are ids of the whole
            vocabulary.
        backend: see there.

    Returns:
        The divergence; with ``return_stats`` :class:`klfast.KLDivergence`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`klfast.topk_kl_divergence` and
            :func:`linear_token_logprobs`.

    Warns once a process of ``ref_logprobs`` above 0, which look like logits.

    Autocast, torch.compile, CUDA graphs and second derivatives: as in
    :func:`linear_token_logprobs`.

    Sources: TRL's and verl's distillation for ``bucket`` and ``drop``; MOPD (2026,
    arXiv:2606.30406) for ``generalized``.
    """
    refuse_dtensors(
        hidden=hidden, ref_token_ids=ref_token_ids, ref_logprobs=ref_logprobs, mask=mask
    )
    arguments = (
        *(hidden, weight, ref_token_ids, ref_logprobs, mask, bias, softcap, direction, tail),
        *(jsd_beta, temperature),
        Reducing(reduction, cu_seqlens, normalizer, coef, return_stats),
        chunk,
    )
    args = args_of(linear_topk_args, arguments, group, backend, may_wait=True)
    outputs = backends.rows(backend, args)
    tensors = hidden, ref_logprobs[..., 0]
    hints.of_call(args.function, *tensors, mask=mask, reduction=reduction, cu_seqlens=cu_seqlens)
    return outputs.of_divergence(return_stats)
