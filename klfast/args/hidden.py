"""The functions that check the arguments from hidden states, as far as this needs no data.
``of_shard``: whether the heads are a shard of the vocabulary, which may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from klfast.args.checks import check_device, check_reduction, check_tensor, shape_text
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
    Chosen,
    Hidden,
    Loss,
    Reducing,
    RowsArgs,
    check_divergence,
    check_topk,
    divergence_args,
    entries_args,
    in_order,
    reduced_of,
)
from klfast.args.signature import check
from klfast.args.values import check_keeping_mask
from klfast.types.dtypes import MASKS, arithmetic_dtype
from klfast.types.names import ReturnEntropy, TailName
from klfast.types.reduction import REDUCTIONS


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


def linear_token_loss_args(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    loss: Callable[..., Tensor],
    mask: Tensor | None,
    inputs: Sequence[Tensor],
    bias: Tensor | None,
    softcap: float | None,
    temperature: Temperature,
    return_entropy: ReturnEntropy,
    reducing: Reducing,
    chunk: int | str,
    of_shard: bool = False,
) -> RowsArgs:
    """The checked arguments of ``linear_token_loss``."""
    name = "linear_token_loss"
    check_reduction(reducing.reduction, is_normalized=reducing.normalizer is not None)
    if not REDUCTIONS[reducing.reduction].is_scalar():
        scalars = ", ".join(repr(name) for name, of in REDUCTIONS.items() if of.is_scalar())
        raise ValueError(
            f"reduction must be one of {scalars}, got {reducing.reduction!r}: for another result, "
            "apply the loss to the log-probs of klfast.linear_token_logprobs"
        )
    check(name, reducing.cu_seqlens, hidden, token_ids, mask, reducing.weights)
    source, keep = _source_of(hidden, weight, bias, softcap, chunk, of_shard), kept(mask)
    return RowsArgs(
        name,
        source,
        token_ids.shape,
        picked(token_ids, hidden, None)[0],
        keep,
        *temperature_of(temperature, hidden, keep, of="hidden"),
        return_entropy="detached" if wants_entropy(return_entropy) else False,
        loss=_loss_of(loss, inputs, token_ids),
        reduced=reduced_of(hidden, "hidden", mask, reducing),
    )


def _loss_of(function: Any, inputs: Any, token_ids: Tensor) -> Loss:
    """The checked loss, with inputs of one number for each token."""
    if not callable(function):
        raise TypeError(
            "loss must be a function of log-probs [n] and of the tensors in inputs, got "
            f"{type(function).__name__}"
        )
    if not isinstance(inputs, tuple | list):
        raise TypeError(
            f"inputs must be a tuple or list of tensors, got {type(inputs).__name__}"
            + (": pass inputs=(tensor,)" if isinstance(inputs, Tensor) else "")
        )
    return Loss(
        function,
        tuple([_input_of(f"inputs[{at}]", value, token_ids) for at, value in enumerate(inputs)]),
        not token_ids.is_meta and torch.is_autocast_enabled(token_ids.device.type),
    )


def _input_of(name: str, given: Any, token_ids: Tensor) -> Tensor:
    """A checked input, [R]."""
    value = check_tensor(name, given, MASKS)
    if value.requires_grad:
        raise ValueError(
            f"{name} must be a constant, got a tensor that requires a gradient: pass "
            f"{name}.detach(), or apply the loss to the log-probs of klfast.linear_token_logprobs"
        )
    shape = token_ids.shape
    fits = [own in (1, of) for own, of in zip(value.shape[::-1], shape[::-1], strict=False)]
    if value.dim() > len(shape) or not all(fits):
        raise ValueError(
            f"{name} must have the shape of token_ids, {list(shape)}, or broadcast to it, got "
            f"{shape_text(value)}"
        )
    check_device(name, value, token_ids, "token_ids")
    return value.expand(shape).reshape(-1)


def linear_kl_divergence_args(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    ref_bias: Tensor | None,
    softcap: Softcap,
    chosen: Chosen,
    temperature: Temperature,
    token_ids: Tensor | None,
    return_entropy: ReturnEntropy,
    reducing: Reducing,
    chunk: int | str,
    of_shard: bool = False,
) -> RowsArgs:
    """The checked arguments of ``linear_kl_divergence``."""
    check_divergence(chosen, reducing, of_shard)
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
    policy = model_of(hidden, weight, bias, caps[0])
    reference = model_of(ref_hidden, ref_weight, ref_bias, caps[1])
    source = Hidden(in_order(chosen, policy, reference), chunk_argument(chunk))
    of = ("linear_kl_divergence", source, hidden, "hidden")
    return divergence_args(*of, mask, chosen, temperature, token_ids, return_entropy, reducing)


def linear_topk_args(
    hidden: Tensor,
    weight: Tensor,
    ref_token_ids: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    chosen: Chosen,
    tail: TailName,
    temperature: Temperature,
    reducing: Reducing,
    chunk: int | str,
    of_shard: bool = False,
) -> RowsArgs:
    """The checked arguments of ``linear_topk_kl_divergence``."""
    check_topk(chosen, tail, reducing)
    tensors = hidden, ref_token_ids, ref_logprobs, mask, reducing.weights
    check("linear_topk_kl_divergence", reducing.cu_seqlens, *tensors)
    source = _source_of(hidden, weight, bias, softcap, chunk, of_shard)
    of = ("linear_topk_kl_divergence", source, hidden, "hidden")
    return entries_args(*of, ref_token_ids, ref_logprobs, mask, chosen, tail, temperature, reducing)


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
