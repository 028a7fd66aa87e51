"""Small PTX texts on the interpreter, over numpy's arrays."""

import ctypes
import functools

import numpy as np
import ptx_build

HEADER = """
.version 8.7
.target sm_90
.address_size 64
"""


class LaunchError(RuntimeError):
    """The error that ended a launch."""


@functools.cache
def library():
    """The functions of ``entry.cpp``."""
    made = ctypes.CDLL(str(ptx_build.core()))
    made.klfast_ptx_error.restype = ctypes.c_char_p
    made.klfast_ptx_load.restype = ctypes.c_void_p
    made.klfast_ptx_load.argtypes = [ctypes.c_char_p] * 3
    made.klfast_ptx_describe_folder.restype = ctypes.c_char_p
    made.klfast_ptx_describe_folder.argtypes = [ctypes.c_char_p]
    made.klfast_ptx_add_allocation.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    made.klfast_ptx_remove_allocation.argtypes = [ctypes.c_void_p]
    made.klfast_ptx_set_options.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_int,
    ]
    made.klfast_ptx_launch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint64,
        ctypes.c_void_p,
    ]
    return made


def load(text, name="kernel"):
    """A kernel of a text."""
    kernel = library().klfast_ptx_load(b"text.ptx", (HEADER + text).encode(), name.encode())
    if kernel is None:
        raise LaunchError(library().klfast_ptx_error().decode())
    return kernel


def kernel(body, *, parameters=1, registers=8, variables=""):
    """A kernel over pointers: %rd0 and so on are its parameters, %tid and %block say who it is."""
    names = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "".join(f"ld.param.u64 %rd{i}, [p{i}];\n" for i in range(parameters))
    kinds = {"rd": "b64", "r": "b32", "rs": "b16", "f": "f32", "fd": "f64", "p": "pred"}
    declared = "".join(f".reg .{type_} %{kind}<{registers}>;\n" for kind, type_ in kinds.items())
    return load(
        f"{variables}\n.visible .entry kernel({names}) {{\n{declared}"
        f".reg .b32 %tid, %block;\n{loads}"
        f"mov.u32 %tid, %tid.x;\nmov.u32 %block, %ctaid.x;\n{body}\nret;\n}}\n"
    )


def launch(made, *arrays, blocks=1, threads=32, of_cluster=1, dynamic_shared=0):
    """Runs a kernel over pointers to arrays; integers are passed as they are."""
    owned = [array for array in arrays if isinstance(array, np.ndarray)]
    words = [array.ctypes.data if isinstance(array, np.ndarray) else int(array) for array in arrays]
    values = (ctypes.c_uint64 * max(len(words), 1))(*words)
    size = ctypes.sizeof(ctypes.c_uint64)
    places = [ctypes.addressof(values) + size * i for i in range(len(words))]
    arguments = (ctypes.c_void_p * max(len(places), 1))(*places)
    for array in owned:
        library().klfast_ptx_add_allocation(array.ctypes.data, array.nbytes)
    try:
        code = library().klfast_ptx_launch(
            made, blocks, threads, of_cluster, dynamic_shared, arguments
        )
    finally:
        for array in owned:
            library().klfast_ptx_remove_allocation(array.ctypes.data)
    if code != 0:
        raise LaunchError(library().klfast_ptx_error().decode())


def set_options(*, races=1, is_random=False, seed=1, perturb=0):
    """Set options of later launches. ``races``: 0 none, 1 shared memory, 2 global memory too."""
    library().klfast_ptx_set_options(races, is_random, seed, perturb)


def aligned(count, dtype, fill=0):
    """An array that begins at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    memory = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + count * dtype.itemsize].view(dtype)
    array[:] = fill
    return array
