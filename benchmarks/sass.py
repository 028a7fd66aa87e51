"""Instructions per element of the GPU kernels, counted in their machine code, without a GPU.

``make sass`` builds the CUDA kernels. For each case of a table it finds the hot loops of the kernel
that serves it (machine_code.py): inputs are aligned, a mask is of bools, and all tokens and
vocabulary entries are near (|x| <= 1), as in the benchmarks. It prints instructions per element,
and the share of a chip's bandwidth that its issue slots allow. That is a bound, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks import tables
from benchmarks.machine_code import Graph, functions_of, hot_trip

RESULTS = Path(__file__).parent / "results"
ASSUMPTIONS = (
    "inputs are aligned, a mask is of bools, and |x| <= 1 everywhere",
    "the hot loops alone: not the beginning and the end of a row, nor rare rows",
    "4 instructions a clock and processor, of them 2 of the ALU and half of one of MUFU",
    "code of sm_90 for every chip",
)


class Chip(NamedTuple):
    """The limits of a device: processors, GHz under load, TB/s that reads and writes reach."""

    processors: int
    clock: float
    bandwidth: float

    def share(self, bytes_moved: float, pipes: dict[str, float]) -> float:
        """The share of the bandwidth that the instructions allow.

        Each clock a processor issues 4 instructions, of which at most 2 on the ALU and 0.5 on MUFU.
        """
        clocks = max(sum(pipes.values()) / 4, pipes.get("ALU", 0) / 2, pipes.get("MUFU", 0) * 2)
        elements = self.processors * self.clock * 1e9 * 32 / clocks
        return min(1.0, elements * bytes_moved / (self.bandwidth * 1e12))


CHIPS = {"H200": Chip(132, 1.755, 4.4), "B200": Chip(148, 1.755, 7.4)}
BLOCK_WARPS = 8
"""The warps of a block, in every kernel here."""


def resident_warps(registers: int) -> int:
    """The warps that the registers of a processor hold. It has 65,536."""
    return 65_536 // (-(-registers // 8) * 8 * 32 * BLOCK_WARPS) * BLOCK_WARPS


Loop = tuple[dict[str, int], int]
"""A hot loop: its features (machine_code.feature_of), and the elements of a lane's trip."""


class Case(NamedTuple):
    """A case of the table.

    Attributes:
        kernel: part of the mangled name, as a pattern.
        loops: hot loops, one after the other.
        bytes: moved per element.
        bound: instructions per element that would leave the kernel to memory.
    """

    kernel: str
    loops: tuple[Loop, ...]
    bytes: float
    bound: float


PLAIN = r"plain_kernel{}.*VariantE{}ELb1"
BF16, FP32 = {"LDG.128": 4, "LDG.64": 2, "series": 8}, {"LDG.128": 4, "LDG.32": 2, "series": 8}
"""The loads of an iteration, and the series of its first eight tokens."""
LOGPROB = r"token_logprobs_{}_kernelI.*BFloat16E"
DIVERGENCE = r"divergence_{}_kernelI.*BFloat16E.*divergences.*\d{}E.*EntropyOfE0E"
ONE_READ = r"divergence_forward_staged_kernelI.*BFloat16E.*divergences.*\d{}E"

CASES = {
    "k3-forward-bf16": Case(
        PLAIN.format("I.*BFloat16E", 0), ((BF16, 16), ({"series": 8}, 16)), 5, 28.5
    ),
    "k3-forward-fp32": Case(PLAIN.format("IfL", 0), ((FP32, 8),), 9, 27.5),
    "k3-gradient-bf16": Case(
        PLAIN.format("I.*BFloat16E", 1),
        (({"LDG.128": 2, "LDG.64": 1, "STG.128": 1, "series": 8}, 8),),
        7,
        30,
    ),
    "k3-gradient-fp32": Case(PLAIN.format("IfL", 1), ((FP32 | {"STG.128": 2}, 8),), 13, 34.5),
    "k3-statistics-bf16": Case(
        PLAIN.format("I.*BFloat16E", 2), ((BF16, 16), ({"series": 8}, 16)), 5, 39
    ),
    "k3-statistics-fp32": Case(PLAIN.format("IfL", 2), ((FP32, 8),), 9, 38),
    "logprob-forward-bf16": Case(
        LOGPROB.format("forward") + "Lb0ELb1ELb0E", (({"LDG.128": 4, "MUFU": 32}, 32),), 2, 5.5
    ),
    "logprob-entropy-bf16": Case(
        LOGPROB.format("forward") + "Lb1ELb1ELb0E",
        (({"LDG.128": 4, "MUFU": 32, "LDS.128": 1, "STS.128": 1}, 32),),
        2,
        7.5,
    ),
    "logprob-backward-bf16": Case(
        LOGPROB.format("backward") + "Lb1E",
        (({"LDG.128": 8, "MUFU": 32, "STG.128": 4}, 32),),
        4,
        12,
    ),
    "kl-forward-bf16": Case(
        DIVERGENCE.format("forward", "Kl"),
        (({"LDG.128": 4, "MUFU": 16, "series": 16}, 16),),
        4,
        21,
    ),
    "kl-backward-bf16": Case(
        DIVERGENCE.format("backward", "Kl") + ".*MemoryE0E",
        (({"LDG.128": 2, "MUFU": 8, "STG.128": 1}, 8),),
        6,
        13,
    ),
    "kl-one-read-bf16": Case(
        ONE_READ.format("Kl"),
        (
            ({"LDG.128": 4, "STS.128": 4, "MUFU": 16, "series": 16}, 16),
            ({"LDS.128": 2, "MUFU": 8, "STG.128": 1}, 8),
        ),
        6,
        36,
    ),
    "jsd-one-read-bf16": Case(
        ONE_READ.format("Jsd"),
        (
            ({"LDG.128": 4, "STS.128": 4, "MUFU": 32}, 16),
            ({"LDS.128": 4, "MUFU": 16}, 16),
            ({"LDS.128": 2, "MUFU": 8, "STG.128": 1}, 8),
        ),
        6,
        65,
    ),
    "tv-one-read-bf16": Case(
        ONE_READ.format("Tv"),
        (
            ({"LDG.128": 4, "STS.128": 4, "MUFU": 16, "series": 16}, 16),
            ({"LDS.128": 4, "MUFU": 16, "series": 16}, 16),
            ({"LDS.128": 2, "MUFU": 8, "STG.128": 1}, 8),
        ),
        6,
        65,
    ),
}
"""As the kernels are on sm_90."""

# Triton's kernel for a case: how tests/support/triton_variants.py builds it, and the loops.
TRITON: dict[str, tuple[str, tuple[Loop, ...]]] = {
    "logprob-entropy-bf16": ("tokens", (({"LDS.128": 2, "MUFU": 16}, 16),)),
    "logprob-backward-bf16": (
        "tokens-backward",
        (({"LDS.128": 2, "MUFU": 16, "STG.128": 2}, 16),),
    ),
    "kl-backward-bf16": (
        "kl-backward",
        (({"LDS.128": 2, "MUFU": 16, "STG.128": 2, "series": 8}, 8),),
    ),
    "kl-one-read-bf16": (
        "kl",
        (
            ({"LDS.128": 2, "MUFU": 16, "series": 8}, 8),
            ({"LDS.128": 2, "MUFU": 8, "STG.128": 1}, 8),
        ),
    ),
    "jsd-one-read-bf16": (
        "jsd",
        (
            ({"MUFU": 8, "series": 4}, 4),
            ({"MUFU": 16, "series": 4}, 4),
            ({"MUFU": 12, "STG.64": 1, "series": 4}, 4),
        ),
    ),
}


class Count(NamedTuple):
    """The instructions of the hot loops, per element.

    Attributes:
        loop: all of them.
        bound: of the case.
        pipes: those that each pipe executes.
        registers: of a thread.
        warps: those that the registers of a processor hold.
        code: bytes, with the functions that the kernel calls.
        share: chip -> the part of its bandwidth that issue slots, the ALU and MUFU allow.
    """

    loop: float
    bound: float
    pipes: dict[str, float]
    registers: int
    warps: int
    code: int
    share: dict[str, float]


def pipes_of(graph: Graph, loops: Iterable[Loop]) -> dict[str, float]:
    """Pipe -> the instructions per element of the hot loops."""
    found: Counter[str] = Counter()
    for features, elements in loops:
        for pipe, count in hot_trip(graph, features).pipes.items():
            found[pipe] += count / elements  # type: ignore[assignment]  # a Counter of floats
    return {pipe: round(count, 2) for pipe, count in found.items()}


def count(case: Case, graph: Graph, registers: int) -> Count:
    """The instructions of a case in the kernel that serves it."""
    pipes = pipes_of(graph, case.loops)
    shares = {name: round(chip.share(case.bytes, pipes), 2) for name, chip in CHIPS.items()}
    instructions = sum(trip.length for _, trip in graph.nodes(data="trip"))
    return Count(
        round(sum(pipes.values()), 2),
        case.bound,
        pipes,
        registers,
        resident_warps(registers),
        16 * instructions,
        shares,
    )


def tool(name: str) -> str:
    """A disassembler: the toolkit's, or the one that comes with Triton."""
    found = shutil.which(name)
    if found is not None:
        return found
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def run(*command: str, folder: Path | None = None) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


def cubins_of(module: Path, arch: str, folder: Path) -> list[Path]:
    """The machine code in an extension module, for one architecture."""
    run(tool("cuobjdump"), "-xelf", f"sm_{arch}", str(module.resolve()), folder=folder)
    return sorted(folder.glob("*.cubin"))


def counts_of(module: Path, arch: str) -> dict[str, Count]:
    """Every case in an extension module."""
    kernels: dict[str, tuple[Graph, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins_of(module, arch, Path(folder)):
            code = functions_of(run(tool("nvdisasm"), "-c", str(cubin)))
            usage = run(tool("cuobjdump"), "-res-usage", str(cubin))
            registers = dict(re.findall(r"Function (\S+):\s+REG:(\d+)", usage))
            kernels |= {
                name: (code[name], int(registers[name])) for name in code if name in registers
            }
    return {name: count(case, *_only(kernels, case.kernel)) for name, case in CASES.items()}


def _only(kernels: dict[str, tuple[Graph, int]], pattern: str) -> tuple[Graph, int]:
    found = [kernel for name, kernel in kernels.items() if re.search(pattern, name)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} kernels are called {pattern}")
    return found[0]


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
    parser.add_argument("--arch", default="90", help="compute capability (default 90)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for the JSON file")
    arguments = parser.parse_args()
    counts = counts_of(arguments.module, arguments.arch)
    data = {
        "arch": f"sm_{arguments.arch}",
        "assumptions": ASSUMPTIONS,
        "chips": {name: chip._asdict() for name, chip in CHIPS.items()},
        "cases": {name: each._asdict() for name, each in counts.items()},
        "triton": {name: triton_loops(name) for name in TRITON},
    }
    print(tables.machine_code_table(data))
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"sass-sm{arguments.arch}.json"
    file.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
