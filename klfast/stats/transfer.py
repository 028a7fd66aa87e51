"""Transfers of numbers from a device to the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from klfast.args.checks import check_number
from klfast.distributed import full_tensor
from klfast.types.dtypes import wide_dtype

Stats = TypeVar("Stats")

NOT_FINITE = ("nan", "inf", "-inf")  # the strings for numbers that JSON does not have


def parts_of(kind: type[Stats], stats: Sequence[Stats]) -> list[Stats]:
    """The statistics of several batches, of which there must be one, all of one kind."""
    parts = [*stats]
    if not parts:
        raise ValueError(f"stats must hold at least one {kind.__name__}, got none")
    for part in parts:
        if not isinstance(part, kind):
            raise TypeError(f"stats must hold {kind.__name__} alone, got {type(part).__name__}")
    return parts


def floats(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Numbers and 0-dim tensors as floats; all tensors of a device take one transfer."""
    tensors = {
        name: value if type(value) is Tensor else full_tensor(value)
        for name, value in numbers.items()
        if isinstance(value, Tensor)
    }
    read: dict[str, float] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        dtype = wide_dtype(device)
        here = {name: t.detach().to(dtype) for name, t in tensors.items() if t.device == device}
        read |= zip(here, torch.stack([*here.values()]).tolist(), strict=True)
    return {name: read[name] if name in read else float(numbers[name]) for name in numbers}


def finite_floats(numbers: Mapping[str, Any]) -> dict[str, float]:
    """``floats`` without NaN and infinity, which JSON does not have."""
    return {name: value for name, value in floats(numbers).items() if math.isfinite(value)}


def json_of(number: float) -> float | str:
    """A number as plain JSON holds it: NaN and infinity are strings."""
    return number if math.isfinite(number) else str(number)


def numbers_of(argument: str, field: object, besides: tuple[str, ...] = NOT_FINITE) -> list[float]:
    """The numbers of a list that ``json_of`` made: finite ones, and the strings in ``besides``."""
    if not isinstance(field, list):
        raise TypeError(f"{argument} must be a list of numbers, got {type(field).__name__}")
    return [
        float(number)
        if isinstance(number, str) and number in besides
        else check_number(argument, number)
        for number in field
    ]


def line_of(name: str, numbers: Mapping[str, Any]) -> str:
    """The ``repr`` of an object in one line, with four digits per number and integers in full."""
    shown = floats(numbers).items()
    texts = (f"{key}={v:.0f}" if v.is_integer() else f"{key}={v:.4g}" for key, v in shown)
    return f"{name}({', '.join(texts)})"


def fields_of(stats: Any) -> str:
    """The ``repr`` of a named tuple field by field, whatever the fields are."""
    fields = zip(stats._fields, stats, strict=True)
    return f"{type(stats).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"


def are_readable(fields: Iterable[Any]) -> bool:
    """True if the fields are plain vectors with values."""
    # Fields are tensors without data while tracing, and other leaves in a tree of tensors.
    is_plain = (
        not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )
    return is_plain and all(
        type(field) is Tensor and field.dim() == 1 and not field.is_meta for field in fields
    )
