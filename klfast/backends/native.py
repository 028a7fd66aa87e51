"""The compiled kernels: C++ on the CPU, CUDA on NVIDIA GPUs."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from klfast.backends.compiled import compiled
from klfast.backends.self_test import FirstUse
from klfast.checks.values import checks_requested
from klfast.logits.normalizers import NATS, Units, of_cuda
from klfast.ops import load
from klfast.ops.direct import Direct, Functions, directly
from klfast.ops.table import Ops


def _why_not(device: torch.device) -> str | None:
    """Why this backend cannot serve ``device``; None if it can."""
    if (error := load.load_error()) is not None:
        return error
    if device.type == "cuda":
        return _cuda_problem(device.index)
    return None if device.type == "cpu" else f"the extension has no kernels for {device.type}"


def _cuda_problem(index: int | None) -> str | None:
    """Why the CUDA kernels cannot run on a device; None if they can."""
    if index in _ready:
        return None
    if torch.version.hip is not None:
        return "the extension's kernels are for NVIDIA GPUs; on this one, pip install triton"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if index is None:
        index = torch.cuda.current_device()
    from klfast import _C

    with torch.cuda.device(index):
        problem = _C.cuda_problem()
    if problem:
        return problem  # and not remembered: it may pass
    _ready.add(index)
    return None


_ready: set[int] = set()
"""Devices that have been asked, and can run the kernels."""

# A question about the machine: torch.compile takes the answer for a constant. Set as
# torch.compiler.assume_constant_result does, which would import all of dynamo.
_cuda_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _serves(tensor: Tensor) -> bool:
    """A call on the device of ``tensor`` needs nothing before the extension's functions."""
    return not tensor.is_cuda or (tensor.get_device() in _checked and not checks_requested())


_FIRST_USE = FirstUse(Ops.of("klfast"), lambda device: device.type == "cuda")
_checked = _FIRST_USE.indices


def _units_of(logits: Tensor, dtype: torch.dtype) -> Units:
    return of_cuda(dtype) if logits.is_cuda else NATS


def _direct() -> Direct | None:
    extension = load.extension()
    if extension is None or extension.direct_problem():
        return None
    functions = cast(Functions, extension)
    return Direct(functions, directly(functions, Ops.of("klfast")), _serves)


NATIVE = compiled(
    "native",
    _why_not,
    Ops.of("klfast"),
    checks_in_kernel=frozenset({"cpu"}),
    direct=_direct(),
    first_use=_FIRST_USE,
    units_of=_units_of,
)
