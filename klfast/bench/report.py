"""What a benchmark leaves behind: its conditions, a table on the terminal, JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from klfast.bench import allocator, idle, tokens
from klfast.bench.cases import Suite
from klfast.bench.measure import Plan, Row
from klfast.version import __version__

HEADINGS = ("case", "impl", "median ms", "min ms", "ratio", "GB/s", "of read", "of floor")
MEMORY_HEADINGS = (*HEADINGS, "MB")


@dataclass
class Results:
    """What has been measured so far.

    Attributes:
        rows: one for each case and candidate.
        probes: case -> the reduction behind its ``read``.
        loads: case -> the load beside its rounds; None where it is not known.
        skipped: case -> why it was left out.
        failed: case -> what went wrong.
        notes: what else a reader must know.
        finished: whether every case was reached.
    """

    rows: list[Any] = field(default_factory=list)
    probes: dict[str, str] = field(default_factory=dict)
    loads: dict[str, idle.Load | None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    finished: bool = False


def conditions(plan: Plan, suite: Suite = tokens.SUITE) -> dict[str, Any]:
    """Where, when and how it is measured."""
    return {
        "date": now(),
        "device": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": instruction_set(),
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        "versions": versions(),
        "commit": commit(),
        "suite": suite.name,
        **suite.facts,
        "rounds": plan.rounds,
        "inputs": "reused" if plan.reused else "rotated",
        "memory": allocator.KEPT if plan.keeps_memory else allocator.GIVEN_BACK,
    }


def load_conditions(results: Results, allowed: bool) -> dict[str, Any]:
    """What other processes took of the cores' time in all rounds, and whether more would have been
    allowed; the share is None where it is not known.
    """
    known = [load for load in results.loads.values() if load is not None]
    share = sum(known, idle.NOTHING).share if len(known) == len(results.loads) else None
    return {"others_share": None if share is None else round(share, 4), "load_allowed": allowed}


def loaded_text(loads: Mapping[str, idle.Load | None]) -> str | None:
    """The load that results were measured under; None if the machine was idle."""
    if None in loads.values():
        return "what other processes took is not known here"
    known = {name: load for name, load in loads.items() if load is not None}
    busy = [name for name, load in known.items() if not load.is_idle]
    total = sum(known.values(), idle.NOTHING)
    if not busy and total.is_idle:
        return None
    most = max(busy or known, key=lambda name: known[name].share)
    return (
        f"other processes took {total.share:.0%} of the cores' time, {known[most].share:.0%} "
        f"in {most}, and more than {idle.LIMIT:.0%} in {len(busy)} of {len(known)} cases"
    )


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    return {
        "klfast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def instruction_set() -> str | None:
    """What the extension's kernels use here; None without the extension."""
    try:
        from klfast import _C
    except ImportError:
        return None
    return _C.instruction_set()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit that klfast runs from, ``-dirty`` if changed since; None outside a checkout.

    ``KLFAST_COMMIT`` says it where the sources have come without their history.
    """
    if told := os.environ.get("KLFAST_COMMIT"):
        return told
    command = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--exclude=*"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def to_json(results: Results, where: dict[str, Any]) -> dict[str, Any]:
    """Loads as shares."""
    shares = {
        name: None if load is None else round(load.share, 4) for name, load in results.loads.items()
    }
    return {"conditions": where, **asdict(results), "loads": shares}


def cells(row: Row, first: bool) -> tuple[str, ...]:
    """A line of the table; the case is named on its first line."""
    return (
        row.case if first else "",
        row.impl,
        f"{row.median_ms:.4g}",
        f"{row.min_ms:.4g}",
        "" if row.ratio is None or row.impl == "klfast" else f"{row.ratio:.3g}x",
        "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
        "" if row.read_share is None else f"{row.read_share:.0%}",
        "" if row.floor_ratio is None else f"{row.floor_ratio:.2f}",
    )


def memory_cells(row: Row, first: bool) -> tuple[str, ...]:
    """The same with the peak of memory."""
    return (*cells(row, first), "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}")


def lines_of(
    rows: Sequence[Any], to_cells: Callable[[Any, bool], tuple[str, ...]]
) -> list[tuple[str, ...]]:
    cases = [""] + [row.case for row in rows]
    return [to_cells(row, row.case != before) for row, before in zip(rows, cases, strict=False)]


def summary(where: dict[str, Any], suite: Suite) -> str:
    """The conditions in one paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    text = (
        f"{where['device']}, {where['threads']} threads, {where['instruction_set']}; {versions}, "
        f"commit {where['commit']}; {where['date']}. {suite.text}; "
        f"{where['rounds']} interleaved rounds, inputs {where['inputs']}; memory: "
        f"{where['memory']}. ratio: that median over klfast's. GB/s: the least bytes of the case "
        f"over the median. read: torch's fastest plain reduction of the inputs' bytes. read + "
        f"fill: that and the fastest plain fill of a gradient. of floor: the median over that of "
        f"read + fill, or without a gradient of read."
    )
    if suite.with_memory:
        text += " MB: peak of resident memory above the inputs, in a process of its own."
    return text


def print_cpu_results(results: Results, where: dict[str, Any], suite: Suite) -> None:
    """The table, what was left out and why, and the conditions."""
    table = (MEMORY_HEADINGS, memory_cells) if suite.with_memory else (HEADINGS, cells)
    print_results(results, summary(where, suite), *table)
    loaded = loaded_text(results.loads)
    if loaded is not None:
        print(f"NOT IDLE: {loaded}. These numbers are not to be published.")
    else:
        print(f"idle: other processes took {where['others_share']:.1%} of the cores' time.")


def print_results(
    results: Results,
    summary_text: str,
    headings: Sequence[str],
    to_cells: Callable[[Any, bool], tuple[str, ...]],
) -> None:
    """The table, what was left out and why, and the conditions."""
    print_table(headings, lines_of(results.rows, to_cells))
    for case, reason in results.skipped.items():
        print(f"left out: {case}: {reason}")
    for case, reason in results.failed.items():
        print(f"failed: {case}: {reason}")
    for note in results.notes:
        print(note)
    print(summary_text)


def print_table(headings: Sequence[str], lines: Sequence[tuple[str, ...]]) -> None:
    """With rich on a terminal, else plainly: rich would cut lines to the width of no terminal."""
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        _print_plainly([tuple(headings), *lines])
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_edge=False, padding=0)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for number, line in enumerate(lines):
        table.add_row(*line, end_section=number + 1 == len(lines) or bool(lines[number + 1][0]))
    Console().print(table)


def _print_plainly(lines: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        left, right = line[:2], line[2:]
        padded = [f"{cell:<{width}}" for cell, width in zip(left, widths[:2], strict=True)]
        padded += [f"{cell:>{width}}" for cell, width in zip(right, widths[2:], strict=True)]
        print("  ".join(padded).rstrip())
