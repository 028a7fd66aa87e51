"""Which dtypes are taken, and in which the arithmetic is done."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MASKS = (torch.bool, *INTEGERS, *FLOATS)
INDICES = (torch.int32, torch.int64)


def arithmetic_dtype(*logprobs: Tensor | None) -> torch.dtype:
    """fp64 if any of these is, else fp32: the dtype of arithmetic and results."""
    is_double = any(t is not None and t.dtype == torch.float64 for t in logprobs)
    return torch.float64 if is_double else torch.float32
