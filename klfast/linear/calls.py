"""The functions that make the call of checked arguments."""

from __future__ import annotations

from torch import Tensor

from klfast.call import layout_of
from klfast.checks.arguments import check_choice, check_reduction
from klfast.checks.values import check_keeping_mask
from klfast.coefficient import Coefficient
from klfast.dtypes import MASKS, arithmetic_dtype
from klfast.linear.arguments import (
    Softcap,
    check_head,
    check_hidden,
    check_same_tokens,
    chunk_argument,
    model_of,
    reference_head,
    refuse_sharded_heads,
    softcaps_of,
    whole_head,
)
from klfast.linear.call import Divergence, LinearCall
from klfast.logits.arguments import (
    Temperature,
    check_per_token,
    check_picks,
    check_sequences,
    jsd_beta_of,
    kept,
    picked,
    spec_of,
    temperature_of,
    wants_entropy,
)
from klfast.logits.call import refuse_jsd
from klfast.names import DIRECTIONS, DirectionName, ReductionName, ReturnEntropy


def linear_token_logprobs_call(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    temperature: Temperature,
    return_entropy: ReturnEntropy,
    chunk: int | str,
    of_shard: bool = False,
) -> LinearCall:
    """The arguments of ``linear_token_logprobs`` after every check that needs no data.

    ``of_shard``: whether the head is a shard of the vocabulary, which may have no word.
    """
    check_hidden("hidden", hidden)
    check_picks(token_ids, hidden, of="hidden")
    if of_shard:
        refuse_sharded_heads(weight=weight, bias=bias)
    weight, bias = whole_head(weight, bias)
    check_head(("weight", "bias"), weight, bias, hidden, "hidden", 0 if of_shard else 1)
    if mask is not None:
        check_per_token("mask", mask, hidden, MASKS, of="hidden")
        check_keeping_mask(mask, arithmetic_dtype(hidden, weight, bias))
    (cap,) = softcaps_of(softcap, 1)
    keep = kept(mask)
    return LinearCall(
        model_of(hidden, weight, bias, cap),
        picked(token_ids, hidden, None)[0],
        keep,
        *temperature_of(temperature, hidden, keep, of="hidden"),
        wants_entropy(return_entropy),
        chunk_argument(chunk),
        hidden.shape[:-1],
        detaches_entropy=return_entropy == "detached",
    )


def linear_kl_divergence_call(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    ref_bias: Tensor | None,
    softcap: Softcap,
    direction: DirectionName,
    jsd_beta: float,
    temperature: Temperature,
    token_ids: Tensor | None,
    return_entropy: ReturnEntropy,
    reduction: ReductionName,
    cu_seqlens: Tensor | None,
    normalizer: float | Tensor | None,
    coef: Coefficient,
    return_stats: bool,
    chunk: int | str,
    of_shard: bool = False,
) -> LinearCall:
    """The arguments of ``linear_kl_divergence`` after every check that needs no data.

    ``of_shard``: as of ``linear_token_logprobs_call``.
    """
    check_choice("direction", direction, DIRECTIONS)
    if of_shard:
        refuse_jsd(direction)
        refuse_sharded_heads(weight=weight, bias=bias, ref_weight=ref_weight, ref_bias=ref_bias)
    least_words = 0 if of_shard else 1
    check_reduction(reduction, normalizer)
    check_hidden("hidden", hidden)
    check_sequences(hidden, cu_seqlens, of="hidden")
    check_hidden("ref_hidden", ref_hidden)
    check_same_tokens(ref_hidden, hidden)
    if mask is not None:
        check_per_token("mask", mask, hidden, MASKS, of="hidden")
    if token_ids is not None:
        check_picks(token_ids, hidden, of="hidden")
    weight, bias = whole_head(weight, bias)
    check_head(("weight", "bias"), weight, bias, hidden, "hidden", least_words)
    ref_weight, ref_bias = reference_head(
        weight, bias, ref_hidden, ref_weight, ref_bias, least_words
    )
    caps = softcaps_of(softcap, 2)
    policy = model_of(hidden, weight, bias, caps[0])
    keep = kept(mask)
    number, inverse = temperature_of(temperature, hidden, keep, of="hidden")
    divergence = Divergence(
        model_of(ref_hidden, ref_weight, ref_bias, caps[1]),
        direction,
        jsd_beta_of(jsd_beta),
        layout_of(mask, cu_seqlens),
        spec_of(hidden, reduction, normalizer, coef, of="hidden"),
        return_stats,
    )
    return LinearCall(
        policy,
        None if token_ids is None else picked(token_ids, hidden, None)[0],
        keep,
        number,
        inverse,
        wants_entropy(return_entropy),
        chunk_argument(chunk),
        hidden.shape[:-1],
        divergence,
        detaches_entropy=return_entropy == "detached",
    )
