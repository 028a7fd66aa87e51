"""Instructions per element of the GPU kernels, counted in their machine code, without a GPU.

``make sass`` builds the CUDA kernels. For each case of a table it finds the hot loops of the kernel
that serves it (machine_code.py): inputs are aligned, a mask is of bools, and all tokens and
vocabulary entries are near (|x| <= 1), as in the benchmarks. It prints instructions per element,
and the share of a chip's bandwidth that its issue slots allow. That is a bound, not a measurement.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import tables
from benchmarks.machine_code import Graph, functions_of, hot_trip

RESULTS = Path(__file__).parent / "results"
ASSUMPTIONS = (
    "inputs are aligned, a mask is of bools, and |x| <= 1 everywhere",
    "the hot loops alone: not the beginning and the end of a row, nor rare rows",
    "4 instructions a clock and processor, of them 2 of the ALU and half of one of MUFU",
    "an instruction on two floats takes as long as two on the FP32 pipe",
    "a B200 runs code of sm_100; registers, warps, code and Triton's loops are for sm_90",
)


class Chip(NamedTuple):
    """The compute capability of a device, and its limits: processors, GHz under load, TB/s that
    reads and writes reach.
    """

    arch: str
    processors: int
    clock: float
    bandwidth: float

    def share(self, bytes_moved: float, pipes: dict[str, float]) -> float:
        """The share of the bandwidth that the instructions allow.

        Each clock a processor issues 4 instructions, of which at most 2 on the ALU and 0.5 on MUFU.
        One on two floats takes the place of two on the FP32 pipe.
        """
        fp32 = pipes.get("FP32", 0) + 2 * pipes.get("FP32 twice", 0)
        alu, mufu = pipes.get("ALU", 0), pipes.get("MUFU", 0)
        clocks = max(sum(pipes.values()) / 4, fp32 / 4, alu / 2, mufu * 2)
        elements = self.processors * self.clock * 1e9 * 32 / clocks
        return min(1.0, elements * bytes_moved / (self.bandwidth * 1e12))


CHIPS = {"H200": Chip("90", 132, 1.755, 4.4), "B200": Chip("100", 148, 1.755, 7.4)}
FIRST = "H200"
"""The chip of the bounds, and of the numbers that are given for one chip."""


class Case(NamedTuple):
    """A case of the table.

    Attributes:
        kernel: part of the mangled name, as a pattern.
        loops: hot loops, one after the other. Each is the elements of a lane's trip, and how often
            the trip has each feature (machine_code.feature_of).
        bytes: moved per element.
        bound: instructions per element that would leave the kernel to an H200's memory.
    """

    kernel: str
    loops: str
    bytes: float
    bound: float


PLAIN = r"plain_kernel{}.*VariantE{}ELb1"
PLAIN_BF16, PLAIN_FP32 = (PLAIN.format(dtype, "{}") for dtype in ("I.*BFloat16E", "IfL"))
BF16, FP32 = "16: LDG.128*4 LDG.64*2 series*8; 16: series*8", "8: LDG.128*4 LDG.32*2 series*8"
"""The loads of an iteration, and the series of its first eight tokens."""
FORWARD, BACKWARD = (rf"token_logprobs_{way}_kernelI.*BFloat16E" for way in ("forward", "backward"))
DIVERGENCE = r"divergence_{}_kernelI.*BFloat16E.*divergences.*\d{}E.*EntropyOfE0E"
KL_READ = "16: LDG.128*4 MUFU*16 series*16"
WRITE = "8: LDG.128*2 MUFU*8 STG.128"
"""The gradient of a row, from its logits."""

CASES = {
    "k3-forward-bf16": Case(PLAIN_BF16.format(0), BF16, 5, 28),
    "k3-forward-fp32": Case(PLAIN_FP32.format(0), FP32, 9, 26),
    "k3-gradient-bf16": Case(PLAIN_BF16.format(1), "8: LDG.128*2 LDG.64 STG.128 series*8", 7, 31),
    "k3-gradient-fp32": Case(PLAIN_FP32.format(1), f"{FP32} STG.128*2", 13, 33.5),
    "k3-statistics-bf16": Case(PLAIN_BF16.format(2), "8: LDG.128*2 LDG.64 series*8", 5, 33.5),
    "k3-statistics-fp32": Case(PLAIN_FP32.format(2), FP32, 9, 35.5),
    "logprob-forward-bf16": Case(FORWARD + "Lb0ELb1ELb0E", "32: LDG.128*4 MUFU*32", 2, 5.5),
    "logprob-entropy-bf16": Case(
        FORWARD + "Lb1ELb1ELb0E", "32: LDG.128*4 MUFU*32 LDS.128 STS.128", 2, 7.5
    ),
    "logprob-backward-bf16": Case(BACKWARD + "Lb1E", "32: LDG.128*8 MUFU*32 STG.128*4", 4, 12),
    "kl-forward-bf16": Case(DIVERGENCE.format("forward", "Kl") + "Lb0E", KL_READ, 4, 21),
    "kl-backward-bf16": Case(DIVERGENCE.format("backward", "Kl") + ".*MemoryE0E", WRITE, 6, 13),
    "kl-one-read-bf16": Case(
        DIVERGENCE.format("forward", "Kl") + "Lb1E", f"{KL_READ}; {WRITE}", 6, 36
    ),
    "jsd-one-read-bf16": Case(
        DIVERGENCE.format("forward", "Jsd") + "Lb1E",
        f"16: LDG.128*4 MUFU*32; 16: LDG.128*4 MUFU*16 VOTE*2; {WRITE}",
        6,
        65,
    ),
    "tv-one-read-bf16": Case(
        DIVERGENCE.format("forward", "Tv") + "Lb1E", f"{KL_READ}; {KL_READ}; {WRITE}", 6, 65
    ),
}

TRITON = {
    "logprob-entropy-bf16": ("tokens", "16: LDS.128*2 MUFU*16"),
    "logprob-backward-bf16": ("tokens-backward", "16: LDS.128*2 MUFU*16 STG.128*2"),
    "kl-backward-bf16": ("kl-backward", "8: LDS.128*2 MUFU*16 STG.128*2 series*8"),
    "kl-one-read-bf16": ("kl", "8: LDS.128*2 MUFU*16 series*8; 8: LDS.128*2 MUFU*8 STG.128"),
    "jsd-one-read-bf16": (
        "jsd",
        "4: MUFU*8 series*4; 4: MUFU*16 series*4; 4: MUFU*12 STG.64 series*4",
    ),
}
"""Triton's kernel for a case: how tests/support/triton_variants.py builds it, and its loops."""


class Count(NamedTuple):
    """The instructions of the hot loops, per element.

    Attributes:
        loop: chip -> all of them.
        bound: of the case.
        pipes: chip -> those that each pipe executes.
        registers: of a thread.
        warps: those that the registers of a processor hold.
        code: bytes, with the functions that the kernel calls.
        share: chip -> the part of its bandwidth that issue slots and pipes allow.
    """

    loop: dict[str, float]
    bound: float
    pipes: dict[str, dict[str, float]]
    registers: int
    warps: int
    code: int
    share: dict[str, float]


class Kernel(NamedTuple):
    """The control flow of a kernel, and the registers of a thread."""

    graph: Graph
    registers: int


def pipes_of(graph: Graph, loops: str) -> dict[str, float]:
    """Pipe -> the instructions per element of the hot loops, written as in ``Case``."""
    found: dict[str, float] = {}
    texts = loops.split("; ")
    for i, loop in enumerate(texts):
        elements, _, text = loop.partition(": ")
        pairs = (feature.partition("*") for feature in text.split())
        features = {name: int(times or 1) for name, _, times in pairs}
        for pipe, count in hot_trip(graph, features, texts[:i].count(loop)).pipes.items():
            found[pipe] = found.get(pipe, 0) + count / int(elements)
    return {pipe: round(count, 2) for pipe, count in found.items()}


def count(case: Case, kernels: dict[str, Kernel]) -> Count:
    """The instructions of a case in the kernels that serve it on each chip."""
    pipes = {name: pipes_of(kernel.graph, case.loops) for name, kernel in kernels.items()}
    graph, registers = kernels[FIRST]
    block_warps = 4 if "divergence" in case.kernel else 8
    of_block = -(-registers // 8) * 8 * 32 * block_warps  # registers, of a processor's 65,536
    return Count(
        loop={name: round(sum(of_chip.values()), 2) for name, of_chip in pipes.items()},
        bound=case.bound,
        pipes=pipes,
        registers=registers,
        warps=65_536 // of_block * block_warps,
        code=16 * sum(trip.length for _, trip in graph.nodes(data="trip")),
        share={name: round(chip.share(case.bytes, pipes[name]), 2) for name, chip in CHIPS.items()},
    )


def tool(name: str) -> str:
    """A disassembler: the toolkit's, or the one that comes with Triton."""
    found = shutil.which(name)
    if found is not None:
        return found
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def run(*command: str, folder: str | None = None) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


def kernels_of(module: Path, arch: str) -> dict[str, Kernel]:
    """Mangled name -> every kernel of an extension module."""
    kernels: dict[str, Kernel] = {}
    with tempfile.TemporaryDirectory() as folder:
        run(tool("cuobjdump"), "-xelf", f"sm_{arch}", str(module.resolve()), folder=folder)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            code = functions_of(run(tool("nvdisasm"), "-c", str(cubin)))
            usage = run(tool("cuobjdump"), "-res-usage", str(cubin))
            registers = dict(re.findall(r"Function (\S+):\s+REG:(\d+)", usage))
            kernels |= {
                name: Kernel(code[name], int(registers[name])) for name in code if name in registers
            }
    return kernels


def counts_of(module: Path) -> dict[str, Count]:
    """Every case in an extension module."""
    kernels = {name: kernels_of(module, chip.arch) for name, chip in CHIPS.items()}

    def serving(case: Case, chip: str) -> Kernel:
        found = [each for name, each in kernels[chip].items() if re.search(case.kernel, name)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} kernels of a {chip} are called {case.kernel}")
        return found[0]

    return {
        name: count(case, {chip: serving(case, chip) for chip in CHIPS})
        for name, case in CASES.items()
    }


def triton_loops(name: str) -> float:
    """The instructions per element in the loops of Triton's kernel for a case, on sm_90."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import triton_compile
    import triton_variants

    variant, loops = TRITON[name]
    compiled = triton_variants.compiled(variant, "bf16")
    (graph,) = functions_of(triton_compile.disassembled(compiled)).values()
    return round(sum(pipes_of(graph, loops).values()), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="an extension module with CUDA kernels")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for the JSON file")
    arguments = parser.parse_args()
    counts = counts_of(arguments.module)
    data = {
        "assumptions": ASSUMPTIONS,
        "chips": {name: chip._asdict() for name, chip in CHIPS.items()},
        "cases": {name: each._asdict() for name, each in counts.items()},
        "triton": {name: triton_loops(name) for name in TRITON},
    }
    print(tables.machine_code_table(data))
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "sass.json"
    file.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
