"""The host side of every kernel: numbers, shapes and strides as kernels take them."""

from __future__ import annotations

import contextlib
import math
import struct
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.backends import backends

from klfast.args.estimator import NO_LIMIT
from klfast.backends.triton.segments import SEGMENT
from klfast.formulas.sequences import number_of_sequences
from klfast.types.device import DEVICES

GPU = next(row for row in DEVICES.values() if row.triton in backends)
"""What the installed Triton compiles for. No build of it serves two rows of ``DEVICES``. If it
serves none, ``_compiler_problem`` has said so before the first call."""
_SEGMENT = SEGMENT.value
ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def bits(number: float) -> int:
    """A double as the integer of the same bits: Triton rounds float arguments to fp32."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


def limit(bound: float) -> float:
    """A limit of the ops as the kernels take it, infinite where absent."""
    return math.copysign(math.inf, bound) if abs(bound) >= NO_LIMIT else bound


class Batch(NamedTuple):
    """A batch's shape: S sequences of T tokens, or of N tokens in all, and P slots for segments."""

    sequences: int
    width: int
    slots: int
    cu_seqlens: Tensor | None


def batch_of(logprobs: Tensor, cu_seqlens: Tensor | None) -> Batch:
    """The shape of the batch that ``logprobs`` holds."""
    sequences, width = number_of_sequences(logprobs, cu_seqlens), logprobs.shape[-1]
    if cu_seqlens is None:
        return Batch(sequences, width, sequences * max(1, -(-width // _SEGMENT)), None)
    return Batch(sequences, width, width // _SEGMENT + sequences, cu_seqlens)


def strides(tensor: Tensor | None) -> tuple[int, int]:
    """The strides between rows and between tokens, in elements."""
    if tensor is None or tensor.dim() == 0:
        return 0, 0
    if tensor.dim() == 1:
        return 0, tensor.stride(0)
    row, column = tensor.stride()
    return row, column


def layout(batch: Batch, *tensors: Tensor | None) -> str:
    """The ``LAYOUT`` of kernels that read these tensors."""
    # 8 elements of 16 bits are 16 bytes, the largest load. A packed sequence may begin anywhere.
    aligned = batch.cu_seqlens is None and batch.width % 8 == 0
    for tensor in tensors:
        if tensor is None:
            continue
        row, column = strides(tensor)
        if column != 1:
            return "strided"
        aligned = aligned and row % 8 == 0 and tensor.data_ptr() % 16 == 0
    return "aligned" if aligned else "unit"


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's GPU current. Kernels are launched on the current GPU."""
    if tensor.is_cpu or tensor.device.index == GPU.module.current_device():
        return contextlib.nullcontext()
    return GPU.module.device(tensor.device)  # type: ignore[no-any-return]
