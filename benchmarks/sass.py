"""What the machine code of the CUDA kernels says of their speed, without a GPU.

Compiles kernels as setup.py does, disassembles them, and follows the hot path: of a kernel's loops
that load whole vectors, the shortest way around that passes the most of them. A loop's far branch
is longer than its near one, and one for unaligned inputs loads smaller vectors, so neither is
followed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_PIPES = (
    ("FP64", r"D(FMA|ADD|MUL|SETP|MNMX)|MUFU\.(RCP64H|RSQ64H)"),
    ("MUFU", r"MUFU"),
    ("conversion", r"F2F|F2I|I2F|FRND|F2FP|I2FP"),
    ("FP32", r"FFMA|FADD|FMUL|HFMA2|HADD2|HMUL2"),
    ("memory", r"LDG|STG|LDS|STS|LDC|ULDC|LD\b|ST\b|ATOM|RED|LDL|STL|CCTL|UBLKCP|LDGSTS"),
    ("shuffle", r"SHFL|VOTE|MATCH|REDUX"),
    ("control", r"BRA|BSSY|BSYNC|EXIT|RET|CALL|BRX|WARPSYNC|BAR|NOP|MEMBAR|ERRBAR|DEPBAR|UCGABAR"),
)
"""Pipe -> the operations that it executes; ALU executes the rest."""


@dataclass
class Block:
    """A basic block: instructions that are executed one after the other."""

    instructions: list[str] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


def pipe_of(instruction: str) -> str:
    """The pipe that executes an instruction."""
    operation = re.sub(r"^@!?U?P\w+\s+", "", instruction)
    return next((name for name, pattern in _PIPES if re.match(pattern, operation)), "ALU")


def functions_of(disassembly: str) -> dict[str, list[Block]]:
    """Mangled name -> basic blocks, of what ``nvdisasm -c`` prints."""
    found: dict[str, list[Block]] = {}
    for text in re.split(r"^\.text\.", disassembly, flags=re.M)[1:]:
        name, _, body = text.partition(":\n")
        found[name] = _blocks_of(body)
    return found


def _blocks_of(body: str) -> list[Block]:
    lines = re.findall(r"^(?:(\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?)\s*$", body, flags=re.M)
    blocks, starts = [Block()], {}
    for label, instruction in lines:
        if label:
            if blocks[-1].instructions:
                blocks.append(Block())
            starts[label] = len(blocks) - 1
        elif instruction:
            blocks[-1].instructions.append(instruction)
            if re.search(r"\b(BRA|BRX|EXIT|RET)\b", instruction):
                blocks.append(Block())
    for position, block in enumerate(blocks):
        block.successors = _successors(block, position, starts, len(blocks))
    return blocks


def _successors(block: Block, position: int, starts: dict[str, int], count: int) -> list[int]:
    last = block.instructions[-1] if block.instructions else ""
    targets = [starts[label] for label in re.findall(r"\.L_x_\d+", last) if label in starts]
    jumps = re.search(r"\b(BRA|BRX|EXIT|RET)\b", last)
    always = jumps and not last.startswith("@") and not re.search(r"BRA\S*\s+!?U?P\d", last)
    if not re.search(r"\b(BRA|BRX)\b", last):
        targets = []
    return targets if always or position + 1 == count else [*targets, position + 1]


def pipes_of(instructions: list[str]) -> Counter[str]:
    """How many of the instructions each pipe executes."""
    return Counter(map(pipe_of, instructions))
