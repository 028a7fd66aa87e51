"""The accepted dtypes, and the dtypes of the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.types.device import DEVICES

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MASKS = (torch.bool, *INTEGERS, *FLOATS)
INDICES = (torch.int32, torch.int64)


def has_float64(device: torch.device) -> bool:
    """True if the device has float64. Apple's GPUs and some of Intel's lack it."""
    lacks_it = DEVICES[device.type].lacks_float64
    return lacks_it is None or not lacks_it(device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the reference, sums and factors: float64, or float32 on a device without it."""
    return torch.float64 if has_float64(device) else torch.float32


def wide(tensor: Tensor) -> Tensor:
    """The tensor in ``wide_dtype``."""
    device = tensor.device
    return tensor.double() if has_float64(device) else tensor.float()


def arithmetic_dtype(*logprobs: Tensor | None) -> torch.dtype:
    """The dtype of arithmetic and results: fp64 if any of these is fp64, else fp32."""
    for tensor in logprobs:
        if tensor is not None and tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def picks_dtype(token_ids: Tensor, arithmetic: torch.dtype) -> torch.dtype:
    """The dtype in which ops return the log-probs of ids [R] or [R, K]: float64 for K per row."""
    return torch.float64 if token_ids.dim() == 2 else arithmetic
