"""The machine code of a GPU kernel: the instructions in a trip of a loop.

``nvdisasm -c`` prints one instruction a line, and a label where a jump may land. The trip is found
without running anything: by the memory accesses and special functions that it must have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import networkx as nx

_PIPES = (
    ("FP64", r"D(FMA|ADD|MUL|SETP|MNMX)|MUFU\.(RCP64H|RSQ64H)"),
    ("MUFU", r"MUFU"),
    ("conversion", r"F2F|F2I|I2F|FRND|F2FP|I2FP"),
    ("FP32 twice", r"(FFMA|FADD|FMUL)2"),
    ("FP32", r"FFMA|FADD|FMUL|IMAD|HFMA2|HADD2|HMUL2"),
    ("memory", r"LDG|STG|LDS|STS|LDC|ULDC|LD\b|ST\b|ATOM|RED|LDL|STL|CCTL|UBLKCP|LDGSTS|SYNCS"),
    ("shuffle", r"SHFL|VOTE|MATCH|REDUX"),
    ("control", r"BRA|BSSY|BSYNC|EXIT|RET|CALL|BRX|WARPSYNC|BAR|NOP|MEMBAR|ERRBAR|DEPBAR|UCGABAR"),
)
"""Pipe -> the operations that it executes. The ALU executes all others: integers, logic,
comparisons, selections, moves. IMAD runs on the FP32 pipe, and so do the moves and shifts that are
written as IMAD. A B200 has instructions on two floats."""

_JUMP = re.compile(r"\b(BRA|BRX|EXIT|RET)\b")
_LABEL = re.compile(r"\.L_x_\d+")
_SERIES = re.compile(r"FFMA2?.* 0\.(0416667|00961810)")  # exp_series.h, in nats and in bits


def feature_of(operation: str) -> str | None:
    """The feature by which an instruction marks the hot path in a loop, or None.

    A feature is an access to memory, or to shared memory by vectors, as ``LDG.128``. ``MUFU``,
    ``VOTE`` and ``series``, a term of the series of exp_series.h, are features too.
    """
    if _SERIES.search(operation):
        return "series"
    found = re.match(r"(LDG|STG|LDS|STS|MUFU|VOTE)\b(\S*)", operation)
    if found is None or found[1] in ("MUFU", "VOTE"):
        return found and found[1]
    width = re.search(r"\.(?:[US])?(8|16|64|128)\b", found[2])
    bits = width[1] if width else "32"
    return f"{found[1]}.{bits}" if found[1][-1] == "G" or bits == "128" else None


class Trip(NamedTuple):
    """A way through some code: its features, and how many instructions each pipe executes."""

    features: Counter[str]
    pipes: Counter[str]

    @classmethod
    def of(cls, instructions: list[str]) -> Trip:
        operations = [re.sub(r"^@!?U?P\w+\s+", "", line) for line in instructions]
        pipes = (
            next((pipe for pipe, pattern in _PIPES if re.match(pattern, each)), "ALU")
            for each in operations
        )
        features: Counter[str] = Counter()
        for each in operations:
            feature = feature_of(each)
            if feature is not None:
                features[feature] += 2 if each.startswith("FFMA2") else 1  # it fuses two floats
        return cls(features, Counter(pipes))

    @property
    def length(self) -> int:
        return self.pipes.total()

    def then(self, other: Trip) -> Trip:
        return Trip(self.features + other.features, self.pipes + other.pipes)


Graph: TypeAlias = "nx.DiGraph[int]"
"""The numbers of the basic blocks. A node's ``trip`` has the instructions of its block."""


def functions_of(disassembly: str) -> dict[str, Graph]:
    """Mangled name -> control flow, of what ``nvdisasm -c`` prints."""
    sections = re.split(r"^\.text\.", disassembly, flags=re.M)[1:]
    parts = (section.partition(":\n") for section in sections)
    return {name: _flow_of(body) for name, _, body in parts}


def _flow_of(body: str) -> Graph:
    lines = re.findall(
        r"^(?:(\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?)\s*$", body, flags=re.M
    )
    blocks: list[list[str]] = [[]]
    starts = {}
    for label, instruction in lines:
        if label:
            if blocks[-1]:
                blocks.append([])
            starts[label] = len(blocks) - 1
        elif instruction:
            blocks[-1].append(instruction)
            if _JUMP.search(instruction):
                blocks.append([])
    graph: Graph = nx.DiGraph()
    for position, block in enumerate(blocks):
        graph.add_node(position, trip=Trip.of(block))
        followers = _successors(block, position, starts, len(blocks))
        graph.add_edges_from((position, each) for each in followers)
    return graph


def _successors(block: list[str], position: int, starts: dict[str, int], count: int) -> list[int]:
    last = block[-1] if block else ""
    jump = _JUMP.search(last)
    targets = [starts[label] for label in _LABEL.findall(last) if label in starts] if jump else []
    if jump is None or jump[1] in ("EXIT", "RET") or "BRA.DIV" in last:
        targets = []  # BRA.DIV: lanes that have parted meet again elsewhere
    always = (
        jump
        and not last.startswith("@")
        and "BRA.DIV" not in last
        and not re.search(r"BRA\S*\s+!?U?P\d", last)
    )
    return targets if always or position + 1 == count else [*targets, position + 1]


def hot_trip(graph: Graph, features: Mapping[str, int], place: int = 0) -> Trip:
    """The shortest trip of a loop with just these features, and any votes if none are named.

    Of several such loops, ``place`` chooses one by length.

    Raises:
        LookupError: no loop has them.
    """
    above = nx.immediate_dominators(graph, 0)
    graph = graph.subgraph({0, *nx.descendants(graph, 0)})

    def closes_a_loop(edge: tuple[int, int]) -> bool:
        block, header = edge
        while block not in (header, 0):
            block = above[block]
        return block == header

    back = [edge for edge in graph.edges if closes_a_loop(edge)]
    forward = graph.copy()
    forward.remove_edges_from(back)
    order = list(nx.topological_sort(forward))
    found = [
        trip for latch, header in back for trip in _trips(forward, order, header, latch, features)
    ]
    if len(found) <= place:
        raise LookupError(f"{len(found)} loops have just {dict(features)}")
    return sorted(found, key=lambda trip: trip.length)[place]


def _trips(
    forward: Graph, order: list[int], header: int, latch: int, features: Mapping[str, int]
) -> list[Trip]:
    """The shortest way from a header to its latch, if one has these features."""
    most = Counter(features)
    between = {header, *nx.descendants(forward, header)} & {latch, *nx.ancestors(forward, latch)}
    ways: dict[int, dict[tuple[tuple[str, int], ...], Trip]] = {}
    for node in (node for node in order if node in between):
        before = [way for u in forward.predecessors(node) for way in ways.get(u, {}).values()]
        if node == header:
            before = [Trip(Counter(), Counter())]
        ways[node] = {}
        for way in (each.then(forward.nodes[node]["trip"]) for each in before):
            if "VOTE" not in features:
                del way.features["VOTE"]
            key = tuple(sorted(way.features.items()))
            shortest = ways[node].get(key)
            if not way.features - most and (shortest is None or way.length < shortest.length):
                ways[node][key] = way
    wanted = tuple(sorted(most.items()))
    return [ways[latch][wanted]] if wanted in ways.get(latch, {}) else []
