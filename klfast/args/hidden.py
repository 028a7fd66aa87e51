"""The functions that check the arguments from hidden states, as far as this needs no data.
``of_shard``: whether the heads are a shard of the vocabulary, which may be empty.
"""

from __future__ import annotations

from torch import Tensor

from klfast.args.heads import (
    Softcap,
    check_head,
    chunk_argument,
    model_of,
    reference_head,
    refuse_sharded_heads,
    softcaps_of,
    whole_head,
)
from klfast.args.logits import (
    Temperature,
    kept,
    picked,
    temperature_of,
    wants_entropy,
)
from klfast.args.rows import (
    Entries,
    Hidden,
    Reducing,
    RowsArgs,
    check_divergence,
    check_topk,
    divergence_args,
    entries_args,
)
from klfast.args.signature import check
from klfast.args.values import check_keeping_mask
from klfast.types.dtypes import arithmetic_dtype
from klfast.types.names import DirectionName, ReturnEntropy, TailName


def linear_token_logprobs_args(
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
) -> RowsArgs:
    """The checked arguments of ``linear_token_logprobs``."""
    check("linear_token_logprobs", None, hidden, token_ids, mask)
    source = _source_of(hidden, weight, bias, softcap, chunk, of_shard)
    if mask is not None:
        check_keeping_mask(mask, arithmetic_dtype(*source.tensors()))
    keep = kept(mask)
    return RowsArgs(
        "linear_token_logprobs",
        source,
        hidden.shape[:-1],
        picked(token_ids, hidden, None)[0],
        keep,
        *temperature_of(temperature, hidden, keep, of="hidden"),
        wants_entropy(return_entropy),
    )


def linear_kl_divergence_args(
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
    reducing: Reducing,
    chunk: int | str,
    of_shard: bool = False,
) -> RowsArgs:
    """The checked arguments of ``linear_kl_divergence``."""
    check_divergence(direction, reducing, of_shard)
    if of_shard:
        refuse_sharded_heads(weight=weight, bias=bias, ref_weight=ref_weight, ref_bias=ref_bias)
    least_words = 0 if of_shard else 1
    tensors = hidden, ref_hidden, mask, token_ids, reducing.weights
    check("linear_kl_divergence", reducing.cu_seqlens, *tensors)
    weight, bias = whole_head(weight, bias)
    check_head(("weight", "bias"), weight, bias, hidden, "hidden", least_words)
    ref_weight, ref_bias = reference_head(
        weight, bias, ref_hidden, ref_weight, ref_bias, least_words
    )
    caps = softcaps_of(softcap, 2)
    both = (
        model_of(hidden, weight, bias, caps[0]),
        model_of(ref_hidden, ref_weight, ref_bias, caps[1]),
    )
    source = Hidden(both[::-1] if direction == "forward" else both, chunk_argument(chunk))
    of = ("linear_kl_divergence", source, hidden, "hidden")
    return divergence_args(
        *of, mask, direction, jsd_beta, temperature, token_ids, return_entropy, reducing
    )


def linear_topk_args(
    hidden: Tensor,
    weight: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    direction: DirectionName,
    tail: TailName,
    jsd_beta: float,
    temperature: Temperature,
    reducing: Reducing,
    chunk: int | str,
    of_shard: bool = False,
) -> RowsArgs:
    """The checked arguments of ``linear_topk_kl_divergence``."""
    check_topk(direction, tail, reducing)
    tensors = hidden, ref_token_ids, ref_logprobs, mask, reducing.weights
    check("linear_topk_kl_divergence", reducing.cu_seqlens, *tensors)
    source = _source_of(hidden, weight, bias, softcap, chunk, of_shard)
    of = ("linear_topk_kl_divergence", source, hidden, "hidden")
    entries = Entries(ref_logprobs, direction, tail)
    return entries_args(*of, ref_token_ids, entries, mask, jsd_beta, temperature, reducing)


def _source_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    chunk: int | str,
    of_shard: bool,
) -> Hidden:
    """The checked source of one model."""
    if of_shard:
        refuse_sharded_heads(weight=weight, bias=bias)
    weight, bias = whole_head(weight, bias)
    check_head(("weight", "bias"), weight, bias, hidden, "hidden", 0 if of_shard else 1)
    (cap,) = softcaps_of(softcap, 1)
    return Hidden((model_of(hidden, weight, bias, cap),), chunk_argument(chunk))
