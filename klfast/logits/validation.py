"""Every check of arguments over logits that needs no data."""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.call import KLCall, KLTensors
from klfast.checks.arguments import check_choice, check_number, shown
from klfast.dtypes import FLOATS, INTEGERS, MASKS, arithmetic_dtype
from klfast.estimator import Estimator
from klfast.logits.call import DIRECTIONS, KLDivergenceCall, TokenLogprobsCall
from klfast.logits.inplace import check_inplace
from klfast.validation import (
    check_cu_seqlens,
    check_device,
    check_normalizer,
    check_reduction,
    check_tensor,
    scalar_argument,
    shape_text,
    without_graph,
)

_K1 = Estimator("k1")
_NO_VOCABULARY = "logits without the vocabulary"


def validate_token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    ignore_index: int | None,
    temperature: float,
    return_entropy: bool,
    inplace_backward: bool,
) -> TokenLogprobsCall:
    """Check the arguments of ``token_logprobs``, all but ``backend``."""
    _check_logits("logits", logits)
    _check_per_token("token_ids", token_ids, logits, INTEGERS)
    if mask is not None:
        _check_per_token("mask", mask, logits, MASKS)
    if ignore_index is not None and (
        isinstance(ignore_index, bool) or not isinstance(ignore_index, int)
    ):
        raise TypeError(f"ignore_index must be an integer or None, got {ignore_index!r}")
    if ignore_index is not None and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must be within int64, got {shown(ignore_index)}")
    temperature, inverse_temperature = _temperature(temperature, logits)
    if inplace_backward:
        check_inplace(logits)
    ids = _flat_ids(token_ids)
    return TokenLogprobsCall(
        _rows(logits),
        ids,
        _keep(mask, ids, ignore_index),
        temperature,
        inverse_temperature,
        return_entropy,
        inplace_backward,
        token_ids.shape,
        without_graph(mask),
    )


def validate_kl_divergence(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    direction: str,
    jsd_beta: float,
    temperature: float,
    reduction: str,
    cu_seqlens: Tensor | None,
    normalizer: float | Tensor | None,
    coef: float | Tensor,
    token_ids: Tensor | None,
    return_stats: bool,
) -> KLDivergenceCall:
    """Check the arguments of ``kl_divergence``, all but ``backend``."""
    check_choice("direction", direction, DIRECTIONS)
    check_reduction(reduction, normalizer)
    _check_logits("logits", logits)
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits must have shape [B, T, V] or [N, V], got {shape_text(logits)}")
    if cu_seqlens is not None:
        if logits.dim() != 2:
            raise ValueError(
                f"logits must be packed, of shape [N, V], with cu_seqlens, got {shape_text(logits)}"
            )
        check_cu_seqlens(cu_seqlens, logits, of="logits")
    _check_logits("ref_logits", ref_logits)
    if ref_logits.shape != logits.shape:
        raise ValueError(
            f"ref_logits must have the shape of logits, {shape_text(logits)}, got "
            f"{shape_text(ref_logits)}"
        )
    check_device("ref_logits", ref_logits, logits, "logits")
    if mask is not None:
        _check_per_token("mask", mask, logits, MASKS)
    if token_ids is not None:
        _check_per_token("token_ids", token_ids, logits, INTEGERS)
    zeros = torch.zeros((), dtype=arithmetic_dtype(logits, ref_logits), device=logits.device)
    zeros = zeros.expand(logits.shape[:-1])
    coef_number, coef_tensor = scalar_argument("coef", coef, logits, of="logits")
    normalizer_number, normalizer_tensor = check_normalizer(normalizer, logits, of="logits")
    tensors = KLTensors(
        zeros,
        zeros,
        None,
        without_graph(mask),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        coef_tensor,
        normalizer_tensor,
    )
    return KLDivergenceCall(
        _rows(logits),
        _rows(ref_logits),
        None if token_ids is None else _flat_ids(token_ids),
        _keep(mask, None, None),
        direction,
        _jsd_beta(jsd_beta),
        *_temperature(temperature, logits),
        KLCall(tensors, _K1, reduction, coef_number, normalizer_number, return_stats),
    )


def _check_logits(argument: str, logits: Tensor) -> None:
    check_tensor(argument, logits, FLOATS)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(
            f"{argument} must have shape [..., V] with at least one word, got {shape_text(logits)}"
        )


def _check_per_token(
    argument: str, value: Tensor, logits: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    check_tensor(argument, value, dtypes)
    if value.shape != logits.shape[:-1]:
        raise ValueError(
            f"{argument} must have the shape of {_NO_VOCABULARY}, {list(logits.shape[:-1])}, got "
            f"{shape_text(value)}"
        )
    check_device(argument, value, logits, "logits")


def _jsd_beta(jsd_beta: float) -> float:
    if torch.compiler.is_compiling() and not isinstance(jsd_beta, bool):
        return jsd_beta  # may be symbolic
    number = check_number("jsd_beta", jsd_beta, above=0)
    if number >= 1:
        raise ValueError(f"jsd_beta must be a number between 0 and 1, got {jsd_beta!r}")
    return number


def _temperature(temperature: float, logits: Tensor) -> tuple[float, Tensor | None]:
    """A checked temperature as (number, None); its inverse as (1, tensor) under torch.compile."""
    if torch.compiler.is_compiling() and type(temperature) in (int, float):
        # May be symbolic. As a tensor it stays so, and a new value needs no new compilation.
        one = torch.ones((), dtype=torch.float64, device=logits.device)
        return 1.0, one / temperature
    number = check_number("temperature", temperature, above=0)
    if not torch.finfo(torch.float32).tiny < 1 / number < torch.finfo(torch.float32).max:
        raise ValueError(f"temperature must have a reciprocal within fp32, got {temperature!r}")
    return number, None


def _rows(logits: Tensor) -> Tensor:
    """[..., V] as [A, T, V]: a view wherever strides allow one."""
    if logits.dim() > 3:
        return logits.flatten(0, -3)
    return logits.reshape((1,) * (3 - logits.dim()) + tuple(logits.shape))


def _flat_ids(token_ids: Tensor) -> Tensor:
    return token_ids.detach().to(torch.int64).reshape(-1).contiguous()


def _keep(mask: Tensor | None, token_ids: Tensor | None, ignore_index: int | None) -> Tensor | None:
    """Which rows are read, [R] bool; None for all."""
    keep = None if mask is None else (mask.detach() != 0).reshape(-1).contiguous()
    if ignore_index is None or token_ids is None:
        return keep
    counts = token_ids != ignore_index
    return counts if keep is None else keep & counts
