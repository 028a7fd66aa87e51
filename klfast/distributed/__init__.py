"""Ranks of a process group, and helpers for DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(value: object) -> bool:
    """True if a value is a DTensor. The module of DTensors is not imported for this."""
    module = getattr(torch.distributed, "tensor", None)  # imported if the program has any DTensor
    return module is not None and isinstance(value, module.DTensor)


def full_tensor(value: Any) -> Any:
    """The plain tensor of a DTensor, gathered unless it is replicated; other values unchanged."""
    return value.full_tensor() if is_dtensor(value) else value


def averaged_full_tensor(tensor: Any) -> Any:
    """``full_tensor``, with a graph, whose gradient is averaged over the ranks."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Partial

    # Each rank's gradient is for its own tokens, and DDP and FSDP average them. torch adds them up.
    mesh = tensor.device_mesh
    summed = tensor.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    return _Scaled.apply(summed, 1 / mesh.size())  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
