"""Ranks of a process group, and helpers for DTensors."""

from __future__ import annotations

from typing import Any

import torch


def is_dtensor(value: object) -> bool:
    """True if a value is a DTensor. The module of DTensors is not imported for this."""
    module = getattr(torch.distributed, "tensor", None)  # imported if the program has any DTensor
    return module is not None and isinstance(value, module.DTensor)


def full_tensor(value: Any) -> Any:
    """The plain tensor of a DTensor, gathered unless it is replicated; other values unchanged."""
    return value.full_tensor() if is_dtensor(value) else value
