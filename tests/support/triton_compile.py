"""Kernels compiled without a GPU, and what the machine code says of them."""

import functools
import inspect
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Resources(NamedTuple):
    """What a compiled kernel takes, per thread."""

    registers: int
    stack: int
    local: int


def build(kernel, pointers, constants, target, num_warps=4, **others):
    """A kernel compiled as the launches do; pointers are types by name ("*fp32"), or absent."""
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


@functools.cache
def _instruction():
    return re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)")


def disassembled(compiled):
    return _run("nvdisasm", "-c", cubin=compiled.asm["cubin"])


def instructions(compiled):
    """The machine instructions in their order, as ``LDG.E.128``."""
    return _instruction().findall(disassembled(compiled))
