"""A pytest plugin (``-p ptx_triton``) that runs Triton's kernels from their PTX without a GPU.

It needs its own process. Triton compiles to PTX as for a GPU of ``KLFAST_PTX_ARCH`` (90 by
default). The driver launches the PTX in the interpreter (``ptx/``) on CPU tensors. ptxas is not
run.
"""

import contextlib
import ctypes
import itertools
import os
from types import SimpleNamespace

import ptx_build

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")  # of tests' own kernels, as klfast's have it
os.environ["TRITON_CACHE_DIR"] = str(ptx_build.FOLDER / "triton")  # PTX where others have cubins

import ptx_run
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from klfast import backends

ARCH = int(os.environ.get("KLFAST_PTX_ARCH", "90"))
SHARED = 227 << 10  # of a block
THREADS = 1024
_numbers = itertools.count(1)


def _library():
    library = ptx_run.library()
    library.klfast_ptx_parameters.argtypes = [ctypes.c_void_p]
    return library


def _load_binary(name, ptx, shared, device):
    """(module, function, registers, spills, the most threads) of a kernel's PTX."""
    path = f"{name}-{next(_numbers)}.ptx"  # variants of a kernel share its name
    kernel = _library().klfast_ptx_load(path.encode(), ptx, name.encode())
    if kernel is None:
        raise ptx_run.LaunchError(_library().klfast_ptx_error().decode())
    return kernel, kernel, 0, 0, THREADS


class _Launcher:
    """Launches of one compiled kernel, whose parameters are words."""

    def __init__(self, source, metadata):
        assert metadata.num_ctas == 1
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
        self._types = [*source.signature.values()]
        self._threads = 32 * metadata.num_warps
        self._shared = metadata.shared

    def __call__(self, x, y, z, stream, kernel, packed, launch, enter, leave, *arguments):
        assert y == z == 1
        pairs = zip(arguments, self._types, strict=True)
        given = [argument for argument, type_ in pairs if type_ != "constexpr"]
        words = [g.data_ptr() if isinstance(g, torch.Tensor) else int(g) for g in given]
        # Triton adds pointers to scratch memory, of which there is none.
        words += [0] * (_library().klfast_ptx_parameters(kernel) - len(words))
        with _allocated([g for g in given if isinstance(g, torch.Tensor)]):
            _launch(kernel, x, self._threads, self._shared, words)


@contextlib.contextmanager
def _allocated(tensors):
    """The storages of tensors, which kernels may touch meanwhile."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for address, size in sizes.items():
        _library().klfast_ptx_add_allocation(address, size)
    try:
        yield
    finally:
        for address in sizes:
            _library().klfast_ptx_remove_allocation(address)


def _launch(kernel, blocks, threads, shared, words):
    values = (ctypes.c_uint64 * len(words))(*[word % 2**64 for word in words])
    size = ctypes.sizeof(ctypes.c_uint64)
    places = (ctypes.addressof(values) + size * i for i in range(len(words)))
    arguments = (ctypes.c_void_p * len(words))(*places)
    if _library().klfast_ptx_launch(kernel, blocks, threads, 1, shared, arguments) != 0:
        raise ptx_run.LaunchError(_library().klfast_ptx_error().decode())


class _Driver:
    """As much of Triton's driver as a launch asks for."""

    launcher_cls = _Launcher
    utils = SimpleNamespace(
        load_binary=_load_binary,
        get_device_properties=lambda device: {"max_shared_mem": SHARED},
    )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", ARCH, 32)


driver.set_active(_Driver())
CUDABackend.make_cubin = lambda self, ptx, metadata, options, capability: ptx.encode()
backends.BACKENDS["triton"] = backends.BACKENDS["triton"]._replace(why_not=lambda device: None)
