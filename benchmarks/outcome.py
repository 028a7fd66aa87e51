"""What a benchmark leaves behind: its conditions, a table on the terminal, JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import allocator, idle, tokens
from benchmarks.cases import Suite
from benchmarks.measure import Plan
from benchmarks.table import Column, print_rows
from klfast.provenance import commit
from klfast.version import __version__

COLUMNS = (
    Column("impl", lambda row: row.impl),
    Column("median ms", lambda row: f"{row.median_ms:.4g}"),
    Column("min ms", lambda row: f"{row.min_ms:.4g}"),
    Column(
        "ratio",
        lambda row: "" if row.ratio is None or row.impl == "klfast" else f"{row.ratio:.3g}x",
        compares=True,
    ),
    Column("GB/s", lambda row: "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}"),
    Column(
        "of read",
        lambda row: "" if row.read_share is None else f"{row.read_share:.0%}",
        compares=True,
    ),
    Column(
        "of floor",
        lambda row: "" if row.floor_ratio is None else f"{row.floor_ratio:.2f}",
        compares=True,
    ),
)
MEMORY = Column("MB", lambda row: "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}")


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


def conditions(plan: Plan, suite: Suite = tokens.SUITE, quick: bool = False) -> dict[str, Any]:
    """Where, when and how it is measured; ``quick``: whether that is too little for ratios."""
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
        "quick": quick,
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


def to_json(results: Results, where: dict[str, Any]) -> dict[str, Any]:
    """Loads as shares."""
    shares = {
        name: None if load is None else round(load.share, 4) for name, load in results.loads.items()
    }
    return {"conditions": where, **asdict(results), "loads": shares}


def summary(where: dict[str, Any], suite: Suite) -> str:
    """The conditions in one paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    text = (
        f"{where['device']}, {where['threads']} threads, {where['instruction_set']}; {versions}, "
        f"commit {where['commit']}; {where['date']}. {suite.text}; "
        f"{where['rounds']} interleaved rounds, inputs {where['inputs']}; memory: "
        f"{where['memory']}. GB/s: the least bytes of the case over the median. read: torch's "
        f"fastest plain reduction of the inputs' bytes. read + fill: that and the fastest plain "
        f"fill of a gradient."
    )
    if not where["quick"]:
        text += (
            " ratio: that median over klfast's. of floor: the median over that of read + fill, or "
            "without a gradient of read."
        )
    if suite.with_memory:
        text += " MB: peak of resident memory above the inputs, in a process of its own."
    return text


def print_cpu_results(results: Results, where: dict[str, Any], suite: Suite) -> None:
    """The table, what was left out and why, and the conditions."""
    columns = (*COLUMNS, MEMORY) if suite.with_memory else COLUMNS
    print_results(results, where, summary(where, suite), columns)
    loaded = loaded_text(results.loads)
    if loaded is not None:
        print(f"NOT IDLE: {loaded}. These numbers are not to be published.")
    else:
        share = where["others_share"]
        verdict = "idle" if share <= idle.LIMIT else "too short to tell whether it was idle"
        print(f"{verdict}: other processes took {share:.1%} of the cores' time.")


def print_results(
    results: Results, where: dict[str, Any], summary_text: str, columns: Sequence[Column]
) -> None:
    """The table, what was left out and why, and the conditions."""
    print_rows(results.rows, columns, results.loads, where["quick"])
    for case, reason in results.skipped.items():
        print(f"left out: {case}: {reason}")
    for case, reason in results.failed.items():
        print(f"failed: {case}: {reason}")
    for note in results.notes:
        print(note)
    print(summary_text)
