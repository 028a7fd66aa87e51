"""Instructions per element of the GPU kernels, counted in their machine code, without a GPU.

``make sass`` builds the CUDA kernels, and for each case of a table follows the hot path of the
kernel that serves it (machine_code.py): inputs are aligned, the mask is of bools, and all tokens
and words are near (|x| <= 1), as in the benchmarks. It prints instructions per element, in the
loops and in all, and the share of a chip's bandwidth that its issue slots allow. That is a bound,
not a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.machine_code import Block, Kernel, functions_of

RESULTS = Path(__file__).parent / "results"
ASSUMPTIONS = (
    "aligned inputs; |x| <= 1 everywhere",
    "logits: 151,936 words, and 24,576 in one read; not a block's first warp, which alone begins "
    "and ends a row",
    "called functions (division, rare rows) and what is left after whole trips do not count",
    "4 instructions a clock and processor, of them 2 of the ALU and half of one of MUFU",
    "code of sm_90 for every chip",
)


@dataclass(frozen=True)
class Chip:
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

BLOCK = 256
"""Threads of a block, of every kernel here."""


def resident_warps(registers: int, shared: int) -> int:
    """The warps that a processor of an H200 holds: of blocks of so many registers a thread and so
    many bytes of shared memory.
    """
    of_threads = -(-registers // 8) * 8 * BLOCK
    blocks = min(2048 // BLOCK, 65_536 // of_threads, (228 << 10) // max(shared, 1))
    return blocks * BLOCK // 32


@dataclass(frozen=True)
class Loop:
    """A hot loop: its features (machine_code.feature_of), and the elements of a lane's trip."""

    features: dict[str, int]
    elements: int


@dataclass(frozen=True)
class Case:
    """A case of the table.

    Attributes:
        kernel: part of the mangled name, as a pattern.
        loops: hot loops, one after the other.
        elements: of a lane, in all trips of a loop between two trips of a loop around it.
        bytes: moved per element.
        bound: instructions per element, in all, that would leave the kernel to memory.
        outer: trips of the loops around the hot ones, from the inside out.
        marks: of machine_code.MARKS, what a warp executes outside of the loops.
        held: what a test holds the case to where it misses its bound.
        written: the part of the bytes that is written; the rest is read.
        shared: bytes of dynamic shared memory of a block.
    """

    kernel: str
    loops: tuple[Loop, ...]
    elements: int
    bytes: float
    bound: float
    outer: tuple[int, ...] = ()
    marks: dict[str, int] = field(default_factory=dict)
    held: float | None = None
    written: float = 0
    shared: int = 0

    @property
    def most(self) -> float:
        return self.bound if self.held is None else self.held


STAGED = 4 * 24_576 + 4_096  # a pair of rows, and the state beside it
LOGPROB = r"token_logprobs_{}_kernelI.*BFloat16E"
DIVERGENCE = r"divergence_{}_kernelI.*BFloat16E.*DivergenceE{}E.*EntropyOfE0E"
ONE_READ = r"divergence_forward_staged_kernelI.*BFloat16E.*DivergenceE{}E"

CASES = {
    "logprob-forward-bf16": Case(
        LOGPROB.format("forward") + "Lb0ELb1ELb0E",
        (Loop({"LDG.128": 4, "MUFU": 32}, 32),),
        576,
        2,
        5.5,
    ),
    "logprob-entropy-bf16": Case(
        LOGPROB.format("forward") + "Lb1ELb1ELb0E",
        (Loop({"LDG.128": 4, "MUFU": 32, "LDS.128": 1, "STS.128": 1}, 32),),
        576,
        2,
        7.5,
        held=7.7,
    ),
    "logprob-backward-bf16": Case(
        LOGPROB.format("backward") + "Lb1E",
        (Loop({"LDG.128": 8, "MUFU": 32, "STG.128": 4}, 32),),
        576,
        4,
        12,
        written=2,
    ),
    "kl-forward-bf16": Case(
        DIVERGENCE.format("forward", 0),
        (Loop({"LDG.128": 4, "MUFU": 16, "series": 16}, 16),),
        64,
        4,
        21,
        (1, 8),
        held=23.8,
    ),
    "kl-backward-bf16": Case(
        DIVERGENCE.format("backward", 0) + ".*MemoryE0E",
        (Loop({"LDG.128": 2, "MUFU": 8, "STG.128": 1}, 8),),
        592,
        6,
        13,
        held=13.5,
        written=2,
    ),
    "kl-one-read-bf16": Case(
        ONE_READ.format(0),
        (
            Loop({"LDG.128": 4, "STS.128": 4, "MUFU": 16, "series": 16}, 16),
            Loop({"LDS.128": 2, "MUFU": 8, "STG.128": 1}, 8),
        ),
        96,
        6,
        36,
        held=40.3,
        written=2,
        shared=STAGED,
    ),
    "jsd-one-read-bf16": Case(
        ONE_READ.format(1),
        (
            Loop({"LDG.128": 4, "STS.128": 4, "MUFU": 32}, 16),
            Loop({"LDS.128": 4, "MUFU": 16}, 16),
            Loop({"LDS.128": 2, "MUFU": 8, "STG.128": 1}, 8),
        ),
        96,
        6,
        65,
        held=73.5,
        written=2,
        shared=STAGED,
    ),
}
"""As the kernels are on sm_90; elements are those of the whole rounds of a lane."""


@dataclass(frozen=True)
class Count:
    """The instructions counted, per element.

    Attributes:
        loop: instructions of the hot loops.
        whole: instructions in all.
        bound: of the case.
        pipes: of `whole`, the instructions that each pipe executes.
        registers: of a thread.
        shared: shared memory of a block, bytes.
        warps: those that a processor of an H200 holds.
        in_flight: KB that they have in flight there: the loads of a trip of the first loop.
        share: chip -> the part of its bandwidth that issue slots and the ALU allow.
    """

    loop: float
    whole: float
    bound: float
    pipes: dict[str, float]
    registers: int
    shared: int
    warps: int
    in_flight: float
    share: dict[str, float]


def count(case: Case, blocks: list[Block], registers: int, shared: int) -> Count:
    """The instructions of a case in the kernel that serves it."""
    kernel = Kernel(blocks)
    hot = [
        kernel.hot(Counter(each.features), case.elements // each.elements) for each in case.loops
    ]
    whole = kernel.whole(hot, case.outer, case.marks)
    elements = case.elements * math.prod(case.outer)
    pipes = {name: round(n / elements, 2) for name, n in whole.pipes.items()}
    pairs = zip(hot, case.loops, strict=True)
    in_loops = sum(each.trip.length / loop.elements for each, loop in pairs)
    shared += case.shared
    warps = resident_warps(registers, shared)
    loaded = case.loops[0].elements * (case.bytes - case.written)
    return Count(
        round(in_loops, 2),
        round(whole.length / elements, 2),
        case.bound,
        pipes,
        registers,
        shared,
        warps,
        round(loaded * 32 * warps / 1024, 1),
        {name: round(chip.share(case.bytes, pipes), 2) for name, chip in CHIPS.items()},
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


def resources_of(cubin: Path) -> dict[str, tuple[int, int]]:
    """Kernel -> registers of a thread and static shared memory of a block."""
    usage = run(tool("cuobjdump"), "-res-usage", str(cubin))
    found = re.findall(r"Function (\S+):\s+REG:(\d+) .*?SHARED:(\d+)", usage)
    return {name: (int(registers), int(shared)) for name, registers, shared in found}


def counts_of(module: Path, arch: str) -> dict[str, Count]:
    """Every case in an extension module."""
    kernels: dict[str, tuple[list[Block], int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins_of(module, arch, Path(folder)):
            code = functions_of(run(tool("nvdisasm"), "-c", str(cubin)))
            resources = resources_of(cubin)
            kernels |= {name: (code[name], *resources[name]) for name in code if name in resources}
    return {name: count(case, *_only(kernels, case.kernel)) for name, case in CASES.items()}


def _only(kernels: dict[str, Any], pattern: str) -> Any:
    found = [kernel for name, kernel in kernels.items() if re.search(pattern, name)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} kernels are called {pattern}")
    return found[0]


# Triton's kernel for a case: how tests/support/triton_variants.py builds it, and the loops.
TRITON: dict[str, tuple[str, tuple[Loop, ...]]] = {
    "logprob-entropy-bf16": ("tokens", (Loop({"LDS.128": 2, "MUFU": 16}, 16),)),
    "logprob-backward-bf16": (
        "tokens-backward",
        (Loop({"LDS.128": 2, "MUFU": 16, "STG.128": 2}, 16),),
    ),
    "kl-backward-bf16": (
        "kl-backward",
        (Loop({"LDS.128": 2, "MUFU": 16, "STG.128": 2, "series": 8}, 8),),
    ),
    "kl-one-read-bf16": (
        "kl",
        (
            Loop({"LDS.128": 2, "MUFU": 16, "series": 8}, 8),
            Loop({"LDS.128": 2, "MUFU": 8, "STG.128": 1}, 8),
        ),
    ),
    "jsd-one-read-bf16": (
        "jsd",
        (
            Loop({"MUFU": 8, "series": 4}, 4),
            Loop({"MUFU": 16, "series": 4}, 4),
            Loop({"MUFU": 12, "STG.64": 1, "series": 4}, 4),
        ),
    ),
}


def triton_loops(name: str) -> float:
    """The instructions per element in the loops of Triton's kernel for a case, on sm_90."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import triton_compile
    import triton_variants

    variant, loops = TRITON[name]
    compiled = triton_variants.compiled(variant, "bf16")
    (blocks,) = functions_of(triton_compile.disassembled(compiled)).values()
    kernel = Kernel(blocks)
    counts = (kernel.hot(Counter(loop.features), 1).trip.length / loop.elements for loop in loops)
    return round(sum(counts), 2)


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
        "chips": {name: asdict(chip) for name, chip in CHIPS.items()},
        "cases": {name: asdict(each) for name, each in counts.items()},
        "triton": {name: triton_loops(name) for name in TRITON},
    }
    print(tables.machine_code_table(data))
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"sass-sm{arguments.arch}.json"
    file.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
