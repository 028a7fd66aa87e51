"""Triton with a driver that launches nothing, for a process of its own.

``import triton_stub`` before klfast. Kernels are compiled for ``KLFAST_STUB_TARGET``, an NVIDIA GPU
of compute capability 9.0 by default, and CPU tensors take the place of a GPU's.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
TARGET = TARGETS[os.environ.get("KLFAST_STUB_TARGET", "cuda")]
LAUNCHES = []
"""(hash of the compiled kernel, grid, arguments) of each launch, tensors as (dtype, shape)."""


class _Launcher:
    def __init__(self, source, metadata):
        self._hash = metadata.hash

    def __call__(self, x, y, z, stream, kernel, packed, launch, enter, leave, *arguments):
        if enter is not None:
            enter(launch)
        described = [
            (a.dtype, tuple(a.shape)) if isinstance(a, torch.Tensor) else a for a in arguments
        ]
        LAUNCHES.append((self._hash, (x, y, z), described))


class _Driver:
    launcher_cls = _Launcher
    utils = SimpleNamespace(
        load_binary=lambda *arguments: (1, 1, 0, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
    )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGET


if TARGET.backend == "hip":
    torch.version.hip = "6"
driver.set_active(_Driver())
CUDABackend.make_cubin = lambda self, ptx, metadata, options, capability: ptx.encode()

import klfast  # noqa: E402 - torch.version is read at the import
from klfast import backends  # noqa: E402

backends.BACKENDS["triton"] = backends.BACKENDS["triton"]._replace(why_not=lambda device: None)
_OURS = (str(Path(klfast.__file__).parent), str(Path(triton.__file__).parent))


def launched(call):
    """The launches of a call."""
    LAUNCHES.clear()
    call()
    return list(LAUNCHES)


def python_calls(call):
    """The number of Python functions of klfast and Triton that run in a call."""
    ours = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            ours.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(ours)
