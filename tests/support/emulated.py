"""The CUDA kernels on CPU tensors: their own source, compiled against an emulation of CUDA.

``tests/support/emulator/cuda_emulator.h`` runs every thread of a block as a fiber. The emulator
says nothing about speed, memory ordering or nvcc's code. If ``KLFAST_PTX_ARCH`` is set, the same
ops run nvcc's PTX in an interpreter (``tests/support/ptx/options.h``).
"""

import contextlib
import fcntl
import functools
import os
import sys
from pathlib import Path

import ptx_build
from torch.utils import cpp_extension

from klfast.backends.compiled import compiled
from klfast.backends.native import NATIVE
from klfast.ops.schemas import Ops, define

ROOT = Path(__file__).parents[2]
EMULATOR = Path(__file__).with_name("emulator")
PTX_ARCH = os.environ.get("KLFAST_PTX_ARCH")
SOURCES = [str(path) for path in sorted(EMULATOR.glob("*.cpp"))]
FLAGS = (
    "-O1",
    "-g0",
    "-std=c++17",
    "-ffp-contract=off",  # as on the device: formulas say where they fuse
    "-DKLFAST_EMULATE_CUDA",
    "-DKLFAST_RING=1",  # tests choose it by KLFAST_RING=1
    "-DKLFAST_POISON",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-Wno-unknown-pragmas",
)


@contextlib.contextmanager
def alone(folder):
    """Let one process at a time build in a folder.

    Torch would wait forever for the lock file of a killed build. The system's lock ends with its
    process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "builder").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


@functools.cache
def extension():
    """Load the emulated ops, or the module of the PTX interpreter. Both are built on first use."""
    library = define("klfast_emulated")
    for name in ("last_launch", "launches"):
        library.define(f"{name}(Tensor like) -> Tensor")
    if PTX_ARCH:
        folder = os.environ.get("KLFAST_PTX_FOLDER")
        return ptx_build.load(Path(folder) if folder else ptx_build.build(PTX_ARCH))
    folder = ROOT / "build" / f"emulator-{sys.implementation.cache_tag}"
    before = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])  # for ninja
    try:
        with alone(folder):
            cpp_extension.load(
                "klfast_emulated",
                SOURCES,
                extra_cflags=list(FLAGS),
                extra_include_paths=[str(EMULATOR), str(ROOT / "csrc")],
                build_directory=str(folder),
                is_python_module=False,
            )
    finally:
        os.environ["PATH"] = before


def ops():
    """The emulated ops."""
    extension()
    return Ops.of("klfast_emulated")


@functools.cache
def backend():
    """The emulated ops as the native backend.

    Its kernels check no values, as on a GPU. Python checks the values of CPU tensors before.
    """
    return compiled("native", NATIVE.why_not, ops())


def allow(tensor):
    """Let kernels touch a tensor whose memory torch has not allocated."""
    if PTX_ARCH:
        extension().add_allocation(tensor.data_ptr(), tensor.nbytes)


if PTX_ARCH:
    extension()  # the interpreter must know every tensor that a test makes
