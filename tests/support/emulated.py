"""The CUDA kernels on CPU tensors: their own source, compiled against an emulation of CUDA.

``tests/support/emulator/cuda_emulator.h`` runs every thread of a block as a fiber. What this
cannot show is speed, memory ordering and what nvcc makes of the source. With ``KLFAST_PTX_ARCH`` it
is instead nvcc's PTX that runs, in an interpreter (``tests/support/ptx/options.h``), behind the
same ops.
"""

import contextlib
import fcntl
import functools
import os
import sys
from pathlib import Path

import ptx_build
from torch.utils import cpp_extension

from klfast.autograd.lse import of_native
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
    "-DKLFAST_POISON",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-Wno-unknown-pragmas",
)


@contextlib.contextmanager
def alone(folder):
    """Builds in a folder one process at a time. A build that was killed has left torch's own lock,
    for which torch would wait forever; the system's ends with its process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "builder").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


@functools.cache
def extension():
    """Loads the emulated ops, built on first use. Under PTX, returns the interpreter's module."""
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
    """The emulated ops as the native backend. As on a GPU its kernels check no values; those of
    tensors on a CPU are checked before.
    """
    return compiled("native", NATIVE.why_not, ops(), units_of=of_native)


def allow(tensor):
    """Says of a tensor in memory that torch has not allocated that kernels may touch it."""
    if PTX_ARCH:
        extension().add_allocation(tensor.data_ptr(), tensor.nbytes)


if PTX_ARCH:
    extension()  # before a test makes a tensor, of which the interpreter must know
