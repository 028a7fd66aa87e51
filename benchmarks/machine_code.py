"""The machine code of a GPU kernel: basic blocks, loops, and the instructions of its hot path.

``nvdisasm -c`` prints one instruction a line, and a label where a jump may land. The hot path is
found without running anything: by ``Kernel.hot`` and ``Kernel.whole``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx

_PIPES = (
    ("FP64", r"D(FMA|ADD|MUL|SETP|MNMX)|MUFU\.(RCP64H|RSQ64H)"),
    ("MUFU", r"MUFU"),
    ("conversion", r"F2F|F2I|I2F|FRND|F2FP|I2FP"),
    ("FP32", r"FFMA|FADD|FMUL|IMAD|HFMA2|HADD2|HMUL2"),
    ("memory", r"LDG|STG|LDS|STS|LDC|ULDC|LD\b|ST\b|ATOM|RED|LDL|STL|CCTL|UBLKCP|LDGSTS|SYNCS"),
    ("shuffle", r"SHFL|VOTE|MATCH|REDUX"),
    ("control", r"BRA|BSSY|BSYNC|EXIT|RET|CALL|BRX|WARPSYNC|BAR|NOP|MEMBAR|ERRBAR|DEPBAR|UCGABAR"),
)
"""Pipe -> the operations that it executes. The ALU executes all others: integers, logic,
comparisons, selections, moves. IMAD runs on the FP32 pipe, and so do the moves and shifts that are
written as IMAD."""

_JUMP = re.compile(r"\b(BRA|BRX|EXIT|RET)\b")
_LABEL = re.compile(r"\.L_x_\d+")
_SERIES = re.compile(r"FFMA.* 0\.(0416667|00961810)")  # exp_series.h, in nats and in bits
MARKS = ("STG", "ATOM", "VOTE", "SHFL", "STS")
"""The operations that tell one way between hot loops from another: they store results, count
arrivals, vote, and exchange numbers between lanes and between warps."""
_MARK = re.compile("|".join(MARKS))


def operation(instruction: str) -> str:
    """An instruction without its predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction)


def pipe_of(instruction: str) -> str:
    """The pipe that executes an instruction."""
    name = operation(instruction)
    return next((pipe for pipe, pattern in _PIPES if re.match(pattern, name)), "ALU")


def feature_of(instruction: str) -> str | None:
    """The feature by which an instruction marks the hot path in a loop, or None.

    A feature is an access to memory, or to shared memory by vectors, as ``LDG.128``. ``MUFU`` and
    ``series``, a term of the series of exp_series.h, are features too.
    """
    name = operation(instruction)
    if _SERIES.search(name):
        return "series"
    found = re.match(r"(LDG|STG|LDS|STS|MUFU)\b(\S*)", name)
    if found is None or found[1] == "MUFU":
        return found and found[1]
    width = re.search(r"\.(?:[US])?(8|16|64|128)\b", found[2])
    bits = width[1] if width else "32"
    return f"{found[1]}.{bits}" if found[1][-1] == "G" or bits == "128" else None


@dataclass
class Block:
    """A basic block: instructions that are executed one after the other."""

    instructions: list[str] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Way:
    """A way through a kernel.

    Attributes:
        counts: instruction -> times that it is executed.
        features: of ``feature_of``, the times.
        marks: of the operations in MARKS, the times outside of hot loops.
        hot: the headers of the hot loops that it leads through.
    """

    counts: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    hot: frozenset[int] = frozenset()

    @classmethod
    def of(cls, instructions: list[str]) -> Way:
        kinds = (kind for kind in map(feature_of, instructions) if kind is not None)
        marks = (found[0] for line in instructions if (found := _MARK.match(operation(line))))
        return cls(Counter(instructions), Counter(kinds), Counter(marks))

    @property
    def length(self) -> int:
        return self.counts.total()

    @property
    def pipes(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for line, times in self.counts.items():
            found[pipe_of(line)] += times
        return found

    @property
    def exchanges(self) -> bool:
        """Lanes exchange numbers on the way."""
        return self.marks["SHFL"] > 0

    def then(self, other: Way) -> Way:
        return Way(
            self.counts + other.counts,
            self.features + other.features,
            self.marks + other.marks,
            self.hot | other.hot,
        )

    def times(self, count: int) -> Way:
        counts, features, marks = (
            Counter({key: count * n for key, n in counter.items()})
            for counter in (self.counts, self.features, self.marks)
        )
        return Way(counts, features, marks, self.hot)


def functions_of(disassembly: str) -> dict[str, list[Block]]:
    """Mangled name -> basic blocks, of what ``nvdisasm -c`` prints."""
    sections = re.split(r"^\.text\.", disassembly, flags=re.M)[1:]
    parts = (section.partition(":\n") for section in sections)
    return {name: _blocks_of(body) for name, _, body in parts}


def _blocks_of(body: str) -> list[Block]:
    lines = re.findall(
        r"^(?:(\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?)\s*$", body, flags=re.M
    )
    blocks, starts = [Block()], {}
    for label, instruction in lines:
        if label:
            if blocks[-1].instructions:
                blocks.append(Block())
            starts[label] = len(blocks) - 1
        elif instruction:
            blocks[-1].instructions.append(instruction)
            if _JUMP.search(instruction):
                blocks.append(Block())
    for position, block in enumerate(blocks):
        block.successors = _successors(block, position, starts, len(blocks))
    return blocks


def _successors(block: Block, position: int, starts: dict[str, int], count: int) -> list[int]:
    last = block.instructions[-1] if block.instructions else ""
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


@dataclass
class Loop:
    """A natural loop.

    Attributes:
        header: the block that it begins with; the kernel itself is a loop from block 0.
        blocks: all of its blocks, including the blocks of inner loops.
        inner: the loops directly inside.
    """

    header: int
    blocks: set[int]
    inner: list[Loop] = field(default_factory=list)

    def walk(self) -> Iterator[Loop]:
        yield self
        for loop in self.inner:
            yield from loop.walk()


@dataclass(frozen=True)
class Hot:
    """A hot loop.

    Attributes:
        trip: the way around it.
        trips: how often it is taken.
    """

    loop: Loop
    trip: Way
    trips: int

    def way_of_all(self) -> Way:
        once = replace(self.trip, marks=Counter(), hot=frozenset([self.loop.header]))
        return once.times(self.trips)


@dataclass
class _Walk:
    """The arguments of Kernel.whole, and its order of ways."""

    hot: Mapping[int, Hot]
    outer: list[int]
    marks: Mapping[str, int]

    def key(self, way: Way) -> tuple[frozenset[int], tuple[int, ...]] | None:
        found = tuple(way.marks[name] for name in self.marks)
        is_other = any(n > most for n, most in zip(found, self.marks.values(), strict=True))
        return None if is_other else (way.hot, found)

    def rank(self, way: Way) -> int:
        return -way.length


@dataclass
class Kernel:
    """The control flow of a kernel."""

    blocks: list[Block]

    def __post_init__(self) -> None:
        edges = [(i, s) for i, block in enumerate(self.blocks) for s in block.successors]
        self.graph = nx.DiGraph([(0, 0), *edges])
        self.graph.remove_edge(0, 0)
        self.body = self._nest()

    def _nest(self) -> Loop:
        """The kernel as a loop around its loops."""
        reached = {0} | nx.descendants(self.graph, 0)
        dominators = nx.immediate_dominators(self.graph, 0)
        loops: dict[int, Loop] = {}
        for latch, header in self.graph.edges:
            if latch in reached and _dominates(dominators, header, latch):
                loop = loops.setdefault(header, Loop(header, {header}))
                loop.blocks |= self._between(header, latch)
        kernel = Loop(0, reached)
        for loop in loops.values():
            around = [o for o in loops.values() if o is not loop and loop.header in o.blocks]
            outer = min(around, key=lambda other: len(other.blocks), default=kernel)
            outer.inner.append(loop)
        return kernel

    def _between(self, header: int, latch: int) -> set[int]:
        found, rest = {header}, [latch]
        while rest:
            block = rest.pop()
            if block not in found:
                found.add(block)
                rest.extend(self.graph.predecessors(block))
        return found

    def hot(self, features: Counter[str], trips: int) -> Hot:
        """The loop with the shortest way around that has just these features."""
        found = ((loop, self.trip(loop, features)) for loop in self.body.walk())
        ways = [(loop, trip) for loop, trip in found if trip is not None]
        if not ways:
            raise LookupError(f"no loop has just {dict(features)}")
        loop, trip = min(ways, key=lambda way: way[1].length)
        return Hot(loop, trip, trips)

    def trip(self, loop: Loop, features: Counter[str]) -> Way | None:
        """The shortest way around a loop, through none inside, with just these features."""

        def key(path: Way) -> tuple[tuple[str, int], ...] | None:
            return None if path.features - features else tuple(sorted(path.features.items()))

        inner: dict[int, list[Way]] = {each.header: [] for each in loop.inner}
        ways = self._ways(loop, inner, key, lambda path: -path.length)
        return ways.get(tuple(sorted(features.items())))

    def whole(self, hot: Sequence[Hot], outer: Sequence[int], marks: Mapping[str, int]) -> Way:
        """The way through the kernel and its hot loops, with these marks outside of them.

        ``outer`` are the trips of the loops around hot ones, from the inside out. A loop in which
        lanes exchange numbers takes five trips, because it combines a warp's lanes. Any other loop
        takes none, because it is for tails or rare cases. Operations that the marks do not name are
        free. Among several ways it takes the shortest.
        """
        walk = _Walk({each.loop.header: each for each in hot}, [*outer], marks)
        ways = self._through(self.body, walk)
        return ways[frozenset(each.loop.header for each in hot), tuple(marks.values())]

    def _through(self, loop: Loop, walk: _Walk) -> dict[Any, Way]:
        if loop is not self.body and loop.header in walk.hot:
            return {None: walk.hot[loop.header].way_of_all()}
        inner = {each.header: self._through(each, walk).values() for each in loop.inner}
        ways = self._ways(loop, inner, walk.key, walk.rank)
        if loop is self.body:
            return ways
        most = max((way.hot for way in ways.values()), key=len, default=frozenset())
        if most:
            count = walk.outer.pop(0) if walk.outer else 1
            return {name: way.times(count) for name, way in ways.items() if way.hot == most}
        if not any(way.exchanges for way in ways.values()):
            return {None: Way()}
        return {name: way.times(5) for name, way in ways.items()}

    def _ways(
        self,
        loop: Loop,
        inner: Mapping[int, Iterable[Way]],
        key: Callable[[Way], Hashable],
        rank: Callable[[Way], Any],
    ) -> dict[Any, Way]:
        """The best ways from a loop's header to its end, one for each key; a key of None ends a
        way. ``inner`` has those through the loops inside, by their headers.
        """
        place = {block: block for block in loop.blocks}
        for each in loop.inner:
            place |= dict.fromkeys(each.blocks, each.header)
        region: nx.DiGraph[int] = nx.DiGraph()
        region.add_nodes_from(place.values())
        region.add_edges_from(
            (place[a], place[b])
            for a, b in self.graph.edges(loop.blocks)
            if b in place and b != loop.header and place[a] != place[b]
        )
        found: dict[int, dict[Any, Way]] = {}
        for node in nx.topological_sort(region):
            own = inner.get(node, [Way.of(self.blocks[node].instructions)])
            before = [Way()] if node == loop.header else []
            before += [way for u in region.predecessors(node) for way in found[u].values()]
            found[node] = _best((a.then(b) for a in before for b in own), key, rank)
        ends = (found[place[block]] for block in loop.blocks if self._ends(loop, block))
        return _best((way for ways in ends for way in ways.values()), key, rank)

    def _ends(self, loop: Loop, block: int) -> bool:
        last = self.blocks[block].instructions[-1:]
        if loop is self.body:
            return "EXIT" in "".join(last)
        return loop.header in self.blocks[block].successors


def _best(
    ways: Iterable[Way], key: Callable[[Way], Hashable], rank: Callable[[Way], Any]
) -> dict[Any, Way]:
    found: dict[Any, Way] = {}
    for way in ways:
        name = key(way)
        if name is not None and (name not in found or rank(way) > rank(found[name])):
            found[name] = way
    return found


def _dominates(dominators: Mapping[int, int], above: int, below: int) -> bool:
    while below != above and dominators.get(below, below) != below:
        below = dominators[below]
    return below == above
