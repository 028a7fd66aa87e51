"""The compiled kernels: C++ on the CPU, CUDA on NVIDIA GPUs.

CUDA has no ``rollout_correction``: a step calls it once, and the reference serves it in torch ops.
"""

from __future__ import annotations

import torch

from klfast.backends.compiled import compiled
from klfast.backends.self_test import FirstUse
from klfast.ops import load
from klfast.ops.schemas import Ops


def _why_not(device: torch.device) -> str | None:
    if (error := load.load_error()) is not None:
        return error
    if device.type == "cuda":
        return _cuda_problem(device.index)
    return None if device.type == "cpu" else f"the extension has no kernels for {device.type}"


def _cuda_problem(index: int | None) -> str | None:
    if index in _ready:
        return None
    if torch.version.hip is not None:
        return "the extension's kernels are for NVIDIA GPUs; on this one, pip install triton"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if index is None:
        index = torch.cuda.current_device()
    extension = load.extension()
    assert extension is not None  # _why_not has asked
    with torch.cuda.device(index):
        problem: str = extension.cuda_problem()
    if problem:
        return problem  # and not remembered: it may pass
    _ready.add(index)
    return None


_ready: set[int] = set()  # devices that have been asked, and can run the kernels

# A question about the machine: torch.compile takes the answer for a constant. Set as
# torch.compiler.assume_constant_result does, which would import all of dynamo.
_cuda_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


NATIVE = compiled(
    "native",
    _why_not,
    Ops.of("klfast"),
    rollout_devices=frozenset({"cpu"}),
    checks_in_kernel=frozenset({"cpu"}),
    first_use=FirstUse(Ops.of("klfast"), "cuda"),
)
