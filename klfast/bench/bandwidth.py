"""The read bandwidth of this machine: the inputs' own bytes, read by torch's plain reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from klfast.bench.cases import Inputs
from klfast.bench.timing import interleave

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


def fastest_probe(inputs: Sequence[Inputs], warm: bool) -> str:
    """The name of the probe that reads these inputs fastest."""
    timings = interleave(PROBES, inputs, TRIAL_ROUNDS, warm=warm)
    return min(timings, key=lambda name: timings[name].median)
