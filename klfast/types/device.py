"""The types of devices: a row for each about which klfast must know more than that it is there."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class DeviceType(NamedTuple):
    """A type of device. The defaults are those of a CPU."""

    module: Any = None  # torch's, with the guards and streams of a GPU
    triton: str = ""  # the backend of Triton that compiles klfast's kernels, if one does
    lacks_float64: Callable[[torch.device], bool] | None = None
    is_capturing: Callable[[], bool] = lambda: False  # the current stream, into a graph
    cache_bytes: Callable[[torch.device], int] = lambda device: 0  # of a GPU's L2 cache
    has_wide_product: bool = False  # a matmul of bf16 with fp32 results
    chunk_bytes: int = 64 * 2**20  # the intended size of the logits of one model's chunk
    most_words: int | None = None  # the largest vocabulary


# A dict and no function, as every call asks; a type without a row has the defaults.
DEVICES: defaultdict[str, DeviceType] = defaultdict(DeviceType)
DEVICES |= {
    "cpu": DeviceType(),
    "cuda": DeviceType(
        torch.cuda,
        triton="amd" if torch.version.hip else "nvidia",
        is_capturing=torch.cuda.is_current_stream_capturing,
        cache_bytes=lambda device: torch.cuda.get_device_properties(device).L2_cache_size,
        has_wide_product=True,
        chunk_bytes=600 * 2**20,
        most_words=2**30,  # the kernels index a row with 32-bit numbers
    ),
    # Triton can compile for Intel's GPUs, and triton="intel" is all that klfast lacks. But nobody
    # has compiled or run the kernels there. They add in float64, which an Arc A770 has not.
    "xpu": DeviceType(
        torch.xpu,
        lacks_float64=lambda device: not torch.xpu.get_device_properties(device).has_fp64,
        # torch 2.10 has no graphs on these GPUs, and so not the question.
        is_capturing=getattr(torch.xpu, "is_current_stream_capturing", lambda: False),
    ),
    "mps": DeviceType(lacks_float64=lambda device: True),
}


def is_capturing(device: torch.device) -> bool:
    """True while a graph is captured on a device's current stream, which allows no sync."""
    own = DEVICES[device.type]
    with own.module.device(device) if own.module else contextlib.nullcontext():
        return own.is_capturing()
