"""The bandwidth of this machine: the inputs' own bytes, read by torch's plain reductions,
and the gradient's, written by a plain fill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.allocator import prefer_large_pages
from benchmarks.cases import Inputs
from benchmarks.timing import interleave

Probe = Callable[[Inputs], Tensor]

TRIAL_ROUNDS = 5


def _whole(inputs: Inputs) -> Tensor:
    if inputs.storage is None:
        raise ValueError("inputs must lie in one block of memory to be read as one")
    return inputs.storage


# All on integers, as the bytes of a mask are denormal numbers to a float unit, and slow.
PROBES: dict[str, Probe] = {
    "sum of int64": lambda inputs: _whole(inputs).sum(),
    "amax of int64": lambda inputs: _whole(inputs).amax(),
    "amax of int32": lambda inputs: _whole(inputs).view(torch.int32).amax(),
    "amax of int16": lambda inputs: _whole(inputs).view(torch.int16).amax(),
    "amax of uint8": lambda inputs: _whole(inputs).view(torch.uint8).amax(),
}
"""Reductions that torch splits over its threads and vectorises. Which is fastest differs by machine
and cache level. None is known to be at the roof: the fastest is an estimate of it from below."""

GPU_PROBES: dict[str, Probe] = {
    **PROBES,
    "sum of float32": lambda inputs: _whole(inputs).view(torch.float32).sum(),
    "amax of float32": lambda inputs: _whole(inputs).view(torch.float32).amax(),
}
"""To a GPU, denormal numbers are like others."""


def _gradient(inputs: Inputs) -> Tensor:
    """Memory for it, as the run's state of memory has it."""
    return torch.empty_like(inputs.arguments[0], requires_grad=False)


FILLS: dict[str, Probe] = {
    "fill": lambda inputs: _gradient(inputs).fill_(1),
    "fill in large pages": lambda inputs: prefer_large_pages(_gradient(inputs)).fill_(1),
}
"""The gradient written, and nothing else. Its memory is fresh or reused as every candidate's is."""


def read_and_fill(probe: str, fill: str) -> Callable[[Inputs], Any]:
    """A plain read of the inputs, then a fill of the gradient: less no backward can do."""

    def call(inputs: Inputs) -> tuple[Tensor, Tensor]:
        return PROBES[probe](inputs), FILLS[fill](inputs)

    return call


def fastest(
    probes: Mapping[str, Probe], inputs: Sequence[Inputs], *, warm: bool, settle: bool = False
) -> str:
    """The name of the probe that is fastest on these inputs."""
    timings = interleave(probes, inputs, TRIAL_ROUNDS, warm=warm, settle=settle)
    return min(timings, key=lambda name: timings[name].median)
