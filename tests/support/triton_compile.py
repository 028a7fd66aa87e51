"""Kernels compiled without a GPU, and what the machine code says of them."""

import contextlib
import functools
import inspect
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
SPILLED = 8 if VERSION >= (3, 8) else 32
"""Bytes of a thread that may spill: one number of a row, of kernels that finish rows of two models.
The PTX of Triton 3.6 and 3.7 needs a few registers more, with any ptxas. With 3.6 nothing spills in
an innermost loop."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Resources(NamedTuple):
    """The registers and bytes of a compiled kernel, per thread."""

    registers: int
    stack: int
    local: int


def build(kernel, pointers, constants, target, num_warps=4, **others):
    """Compile a kernel as a launch does. ``pointers`` has the types by name, such as "*fp32"."""
    signature, constexprs = {}, {}
    for parameter in inspect.signature(kernel.fn).parameters.values():
        name = parameter.name
        if parameter.annotation is tl.int64:
            signature[name] = "i64"
        elif name in pointers:
            signature[name] = pointers[name]
        else:
            signature[name] = "constexpr"
            constexprs[name] = constants.get(name)
    source = ASTSource(kernel, signature, constexprs)
    options = {"num_warps": num_warps, "enable_fp_fusion": False, **others}
    return triton.compile(source, target=target, options=options)


def build_nvidia(kernel, pointers, constants, capability, num_warps=4):
    return build(kernel, pointers, constants, GPUTarget("cuda", capability, 32), num_warps)


def _run(tool, *arguments, cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / tool, *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(compiled):
    usage = _run("cuobjdump", "-res-usage", cubin=compiled.asm["cubin"])
    found = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(found["REG"], found["STACK"], found["LOCAL"])


def assert_no_spills(compiled):
    used = resources(compiled)
    assert used.local == 0, used
    assert used.stack <= SPILLED, used
    assert used.registers < 255, used


@functools.cache
def _instruction():
    return re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)")


def disassembled(compiled):
    return _run("nvdisasm", "-c", cubin=compiled.asm["cubin"])


def instructions(compiled):
    """The machine instructions in their order, as ``LDG.E.128``."""
    return _instruction().findall(disassembled(compiled))


class Launch(NamedTuple):
    """A launch that was not made, with its kernel and arguments."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, object]
    options: dict[str, object]

    def variant(self):
        """A key that is equal for all launches that share machine code."""
        backend = make_backend(GPUTarget("cuda", 90, 32))
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        _, specialization, rest = bind(**self.arguments, **self.options)
        return self.kernel.fn.__name__, str(specialization), str(sorted(rest.items()))

    def build(self, target):
        pointers = {
            name: TYPES[value.dtype]
            for name, value in self.arguments.items()
            if isinstance(value, torch.Tensor)
        }
        others = {name: v for name, v in self.arguments.items() if name not in pointers}
        return build(self.kernel, pointers, others, target, **self.options)


@contextlib.contextmanager
def recorded():
    """The list of the launches that calls would make."""
    launches = []

    def record(kernel, *args, grid, warmup, **options):
        names = inspect.signature(kernel.fn).parameters
        arguments = dict(zip(names, args, strict=False))
        arguments |= {name: options.pop(name) for name in names if name in options}
        launches.append(Launch(kernel, grid, arguments, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        yield launches
