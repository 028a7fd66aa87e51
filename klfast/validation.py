"""Every check of arguments that needs no data: type, shape, dtype, device, layout.

What the tensors hold is checked in ``value_checks``.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from klfast.call import NORMALIZED_REDUCTIONS, REDUCTIONS, KLCall, KLTensors
from klfast.checks.arguments import check_choice, check_number
from klfast.dtypes import FLOATS, INDICES, INTEGERS, MASKS
from klfast.estimator import Estimator, as_estimator
from klfast.layout import number_of_sequences


def validate_kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    estimator: str | Estimator,
    reduction: str,
    cu_seqlens: Tensor | None,
    old_logprobs: Tensor | None,
    normalizer: float | Tensor | None,
    coef: float | Tensor,
    return_stats: bool,
) -> KLCall:
    """Check the arguments of ``kl_penalty``, all but ``backend``."""
    check_reduction(reduction, normalizer)
    _check_layout(logprobs, cu_seqlens)
    _check_like("ref_logprobs", ref_logprobs, logprobs, FLOATS)
    if old_logprobs is not None:
        _check_like("old_logprobs", old_logprobs, logprobs, FLOATS)
    if mask is not None:
        _check_like("mask", mask, logprobs, MASKS)
    coef_number, coef_tensor = scalar_argument("coef", coef, logprobs)
    normalizer_number, normalizer_tensor = check_normalizer(normalizer, logprobs)
    chosen = as_estimator(estimator)
    has_gradient = chosen.gradient != "none"
    tensors = KLTensors(
        logprobs if has_gradient else logprobs.detach(),
        ref_logprobs if has_gradient else ref_logprobs.detach(),
        without_graph(old_logprobs),
        without_graph(mask),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        coef_tensor,
        normalizer_tensor,
    )
    return KLCall(tensors, chosen, reduction, coef_number, normalizer_number, return_stats)


def validate_kl_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    kl_coef: float | Tensor,
    estimator: str | Estimator,
    cu_seqlens: Tensor | None,
    return_stats: bool,
) -> KLCall:
    """Check the arguments of ``kl_rewards``, all but ``backend``."""
    call = validate_kl_penalty(
        logprobs, ref_logprobs, mask, estimator, "none", cu_seqlens, None, None, 1.0, return_stats
    )
    number, tensor = scalar_argument("kl_coef", kl_coef, logprobs)
    check_tensor("scores", scores, MASKS)
    sequences = number_of_sequences(logprobs, cu_seqlens)
    if tuple(scores.shape) != (sequences,):
        raise ValueError(
            f"scores must have shape [{sequences}], one per sequence, got {shape_text(scores)}"
        )
    check_device("scores", scores, logprobs)
    tensors = call.tensors._replace(
        logprobs=logprobs.detach(),
        ref_logprobs=ref_logprobs.detach(),
        coef=tensor,
    )
    return call._replace(tensors=tensors, coef=number, scores=scores.detach())


def _check_layout(logprobs: Tensor, cu_seqlens: Tensor | None) -> None:
    check_tensor("logprobs", logprobs, FLOATS)
    if cu_seqlens is None:
        if logprobs.dim() not in (1, 2):
            raise ValueError(f"logprobs must have shape [B, T] or [N], got {shape_text(logprobs)}")
        return
    if logprobs.dim() != 1:
        raise ValueError(
            f"logprobs must be packed, of shape [N], with cu_seqlens, got {shape_text(logprobs)}"
        )
    check_cu_seqlens(cu_seqlens, logprobs)


def check_reduction(reduction: str, normalizer: float | Tensor | None) -> None:
    """The reduction is a known one, and has a denominator if there is a normalizer."""
    check_choice("reduction", reduction, REDUCTIONS)
    if normalizer is not None and reduction not in NORMALIZED_REDUCTIONS:
        means = ", ".join(repr(name) for name in NORMALIZED_REDUCTIONS)
        raise ValueError(f"normalizer must go with one of {means}, got reduction {reduction!r}")


def check_cu_seqlens(cu_seqlens: Tensor, like: Tensor, *, of: str = "logprobs") -> None:
    """Its type, shape and device; what it holds is for ``value_checks``."""
    check_tensor("cu_seqlens", cu_seqlens, INDICES)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape [S+1], got {shape_text(cu_seqlens)}")
    check_device("cu_seqlens", cu_seqlens, like, of)


def check_normalizer(
    normalizer: float | Tensor | None, like: Tensor, *, of: str = "logprobs"
) -> tuple[float | None, Tensor | None]:
    """A normalizer as (number, None) or (1, tensor); (None, None) if there is none."""
    if normalizer is None:
        return None, None
    return scalar_argument("normalizer", normalizer, like, of=of, above=0)


def _check_like(
    argument: str, value: object, logprobs: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    tensor = check_tensor(argument, value, dtypes)
    if tensor.shape != logprobs.shape:
        raise ValueError(
            f"{argument} must have the shape of logprobs, {shape_text(logprobs)}, got "
            f"{shape_text(tensor)}"
        )
    check_device(argument, tensor, logprobs)


def check_tensor(argument: str, value: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A dense tensor of one of the dtypes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        expected = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{argument} must have one of the dtypes {expected}, got {value.dtype}")
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise ValueError(f"{argument} must have the layout torch.strided, got {kind}")
    return value


def check_device(argument: str, value: Tensor, like: Tensor, of: str = "logprobs") -> None:
    """It is where ``like`` is, the argument called ``of``."""
    if value.device != like.device:
        raise ValueError(
            f"{argument} must be on the device of {of}, {like.device}, got {value.device}"
        )


def without_graph(value: Tensor | None) -> Tensor | None:
    """The tensor without a graph."""
    return value.detach() if value is not None and value.requires_grad else value


def scalar_argument(
    argument: str,
    value: object,
    like: Tensor,
    *,
    of: str = "logprobs",
    above: float | None = None,
) -> tuple[float, Tensor | None]:
    """A checked number as (number, None), or a 0-dim tensor for the kernels as (1, tensor)."""
    if torch.compiler.is_compiling() and type(value) in (int, float):
        # May be symbolic. As a tensor it stays so, and a new value needs no new compilation.
        return 1.0, cast(float, value) * torch.ones((), dtype=torch.float64, device=like.device)
    if not isinstance(value, Tensor):
        return check_number(argument, value, above=above), None
    check_tensor(argument, value, (*FLOATS, *INTEGERS))
    if value.dim() != 0:
        raise ValueError(f"{argument} must be a number or a 0-dim tensor, got {shape_text(value)}")
    if value.device != like.device and value.device.type == "cpu":
        return check_number(argument, value.item(), above=above), None
    check_device(argument, value, like, of)
    return 1.0, without_graph(value)


def shape_text(tensor: Tensor) -> str:
    """A tensor's shape as error texts write it."""
    return str(list(tensor.shape))
