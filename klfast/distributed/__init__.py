"""Ranks and DTensors: what is a DTensor, and its full tensor."""

from __future__ import annotations

from typing import Any

import torch


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor, without importing what makes them."""
    module = getattr(torch.distributed, "tensor", None)  # a program that has one has imported them
    return module is not None and isinstance(value, module.DTensor)


def full_tensor(value: Any) -> Any:
    """The plain tensor of a DTensor, which a replicated one has already; all else as it is."""
    return value.full_tensor() if is_dtensor(value) else value
