"""Masks, and values of masked tokens."""

import math

import torch

LAST = 2**16  # the index of the last token, which a 16-bit index does not reach


def last_alone(number):
    """(tokens [2, LAST + 1] of which all but the last are NaN, the mask that keeps it alone)."""
    mask = torch.zeros(2, LAST + 1, dtype=torch.bool)
    mask[1, LAST] = True
    return torch.where(mask, number, torch.nan), mask


POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


MASKS = {
    "no-mask": lambda shape: None,
    "half": lambda shape: torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 == 0,
    "all-masked": lambda shape: torch.zeros(shape),
}
"""Name -> the mask of a shape."""
