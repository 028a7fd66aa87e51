"""Masks of every kind, and what may stand under them."""

import math

import torch

POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASK_DTYPES = (torch.bool, *INTEGERS, *FLOATS)

MASKS = {
    "no-mask": lambda shape: None,
    "half": lambda shape: torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 == 0,
    "all-masked": lambda shape: torch.zeros(shape),
}
"""Name -> the mask of a shape."""
