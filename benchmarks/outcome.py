"""The outcome of a benchmark: its conditions, a table on the terminal, JSON."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import allocator, idle
from benchmarks.cases import Suite
from benchmarks.gpu import Ceilings, GpuPlan
from benchmarks.gpu_timing import GRAPH_CALLS, LONG_CALL
from benchmarks.measure import Plan
from benchmarks.timing import NOISY
from klfast import info
from klfast.backends.info import commit
from klfast.cli.check.report import print_plainly

NOISY_FLAG, BUSY_FLAG = "noisy", "busy"

_CLOCKS = (
    *("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem"),
    *("temperature.gpu", "power.draw"),
)


@dataclass
class Results:
    """Measurements so far.

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


# Conditions


def conditions(plan: Plan) -> dict[str, Any]:
    """Where, when and how it is measured on a CPU."""
    return {
        **provenance(versions("klfast", "torch", "python")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": info()["cpu"],
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        "rounds": plan.rounds,
        "inputs": "reused" if plan.reused else "rotated",
        "memory": allocator.KEPT if plan.keeps_memory else allocator.GIVEN_BACK,
    }


def provenance(of: Mapping[str, str | None]) -> dict[str, Any]:
    """When, on which processor, and of which commit and versions something is measured."""
    return {"date": now(), "device": cpu_model(), "versions": {**of}, "commit": commit()}


def gpu_conditions(place: torch.device, plan: GpuPlan, ceilings: Ceilings) -> dict[str, Any]:
    """The same on a GPU. To be asked for while the clocks are still up."""
    return {
        **provenance(versions("klfast", "torch", "python", "triton", "cuda")),
        **device_facts(place),
        "clocks": clocks(place),
        "host": {"processor": cpu_model(), "cores": os.cpu_count()},
        "rounds": plan.rounds,
        "graph_calls": GRAPH_CALLS,
        "budget_s": plan.budget,
        "ceilings": asdict(ceilings),
    }


def device_facts(place: torch.device) -> dict[str, Any]:
    """The name and the measures of the chip; of no GPU, the processor's name."""
    if place.type != "cuda":
        return {"device": cpu_model()}
    properties = torch.cuda.get_device_properties(place)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def clocks(place: torch.device) -> dict[str, str] | None:
    """Readings of nvidia-smi: the driver, the clocks, the heat and the power; None without it."""
    if place.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader"]
    command += ["--id", f"GPU-{torch.cuda.get_device_properties(place).uuid}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    return dict(zip(_CLOCKS, done.stdout.strip().split(", "), strict=False))


def load_conditions(results: Results, allowed: bool) -> dict[str, Any]:
    """The share of the cores' time that other processes took in all rounds, and whether more was
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


def versions(*names: str) -> dict[str, str | None]:
    known = info()["versions"]
    return {name: known[name] for name in names}


def releases(*packages: str) -> dict[str, str]:
    """The versions of those that are installed."""
    return {name: metadata.version(name) for name in packages if importlib.util.find_spec(name)}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


# The table


@dataclass(frozen=True)
class Column:
    """A heading, and the text of a row's cell.

    Attributes:
        key: the row's attribute.
        pattern: its format.
        scale: what it is multiplied by.
        compares: whether it holds one time against another, which takes more rounds than
            ``--quick`` has.
        none: the cell of None.
    """

    heading: str
    key: str
    pattern: str = "{:.4g}"
    scale: float = 1
    compares: bool = False
    none: str = ""

    def text(self, row: Any) -> str:
        value = getattr(row, self.key)
        if value is None or (self.key == "ratio" and row.impl == "klfast"):
            return self.none
        return value if isinstance(value, str) else self.pattern.format(value * self.scale)


IMPL = Column("impl", "impl")
RATIO = Column("ratio", "ratio", "{:.3g}x", compares=True)
SPEED = Column("GB/s", "gb_per_s", "{:.1f}")
READ = Column("of read", "read_share", "{:.0%}", compares=True)
COLUMNS = (
    IMPL,
    Column("median ms", "median_ms"),
    Column("min ms", "min_ms"),
    RATIO,
    SPEED,
    READ,
    Column("of floor", "floor_ratio", "{:.2f}", compares=True),
)
MEMORY = Column("MB", "peak_bytes", "{:.1f}", 1e-6)
GPU_COLUMNS = (
    IMPL,
    Column("kernel us", "kernel_ms", scale=1e3),
    Column("min us", "kernel_min_ms", scale=1e3),
    RATIO,
    Column("graph us", "graph_ms", scale=1e3, none="-"),
    Column("host us", "host_ms", scale=1e3),
    SPEED,
    READ,
    Column("of copy", "copy_share", "{:.0%}", compares=True),
    Column("MB", "peak_bytes", scale=1e-6),
)


def flags_text(noisy: bool, busy: bool) -> str:
    """The flags against a row's times: their spread, and the load beside its case."""
    return ", ".join([NOISY_FLAG] * noisy + [BUSY_FLAG] * busy)


def _flags(row: Any, loads: Mapping[str, idle.Load | None]) -> str:
    load = loads.get(row.case)
    return flags_text(row.is_noisy, load is not None and not load.is_idle)


def print_results(
    results: Results, where: dict[str, Any], summary: str, columns: Sequence[Column]
) -> None:
    """The table, with a case's name on the first of its rows; what is flagged and was left out, and
    the conditions.
    """
    quick, rows = where["quick"], results.rows
    shown = [column for column in columns if not (quick and column.compares)]
    before = [None, *(row.case for row in rows)]
    flagged = [_flags(row, results.loads) for row in rows]
    lines = [
        ("" if row.case == last else row.case, *(column.text(row) for column in shown), flags)
        for row, last, flags in zip(rows, before, flagged, strict=False)
    ]
    print_plainly([("case", *(column.heading for column in shown), "flags"), *lines])
    for sentence in _notes(flagged, quick):
        print(sentence)
    for case, reason in results.skipped.items():
        print(f"left out: {case}: {reason}")
    for case, reason in results.failed.items():
        print(f"failed: {case}: {reason}")
    for note in results.notes:
        print(note)
    print(summary)


def _notes(flagged: Sequence[str], quick: bool) -> Iterator[str]:
    noisy, busy = (sum(flag in text for text in flagged) for flag in (NOISY_FLAG, BUSY_FLAG))
    if noisy:
        yield (
            f"{NOISY_FLAG}: in {noisy} of {len(flagged)} rows the median is {NOISY:g} times the "
            "minimum or more. Measure these again."
        )
    if busy:
        yield (
            f"{BUSY_FLAG}: beside {busy} of {len(flagged)} rows other processes took more than "
            f"{idle.LIMIT:.0%} of the cores' time."
        )
    if quick:
        yield (
            "--quick shows that it works: its rounds are too few, and its shapes too small, for "
            "ratios, which are left out."
        )


def print_cpu_results(results: Results, where: dict[str, Any], suite: Suite) -> None:
    """Also whether the machine was idle."""
    columns = (*COLUMNS, MEMORY) if suite.with_memory else COLUMNS
    print_results(results, where, _summary(where, suite), columns)
    loaded = loaded_text(results.loads)
    if loaded is not None:
        print(f"NOT IDLE: {loaded}. These numbers are not to be published.")
    else:
        share = where["others_share"]
        verdict = "idle" if share <= idle.LIMIT else "too short to tell whether it was idle"
        print(f"{verdict}: other processes took {share:.1%} of the cores' time.")


def print_gpu_results(results: Results, where: dict[str, Any], suite: Suite) -> None:
    print_results(results, where, _gpu_summary(where, suite), GPU_COLUMNS)


def _named(where: dict[str, Any]) -> str:
    named = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"{named}, commit {where['commit']}; {where['date']}"


def _summary(where: dict[str, Any], suite: Suite) -> str:
    """The conditions in one paragraph."""
    text = (
        f"{where['device']}, {where['threads']} threads, {where['instruction_set']}; "
        f"{_named(where)}. {suite.text}; {where['rounds']} interleaved rounds, inputs "
        f"{where['inputs']}; memory: {where['memory']}. GB/s: the least bytes of the case over the "
        "median. read: torch's fastest plain reduction of the inputs' bytes. read + fill: that and "
        "the fastest plain fill of a gradient."
    )
    if not where["quick"]:
        text += (
            " ratio: that median over klfast's. of floor: the median over that of read + fill, or "
            "without a gradient of read."
        )
    if suite.with_memory:
        text += " MB: peak of resident memory above the inputs, in a process of its own."
    return text


def _gpu_summary(where: dict[str, Any], suite: Suite) -> str:
    ceilings = where["ceilings"]
    of_ratios = (
        ""
        if where["quick"]
        else f" of read, of copy: of {ceilings['read_gb_per_s']:.0f} GB/s read and "
        f"{ceilings['copy_gb_per_s']:.0f} GB/s copied in the same run, where no call took "
        f"{ceilings['nothing_us']:.2g} us. ratio: the kernel's median over the first line's."
    )
    return (
        f"{where['device']}, clocks {where['clocks']}; {_named(where)}. {suite.text}; "
        f"{where['rounds']} interleaved rounds. kernel: on the device, L2 flushed. graph: per call "
        f"in a CUDA graph of {where['graph_calls']}, inputs in L2 where they fit; for calls of "
        f"less than {LONG_CALL * 1e3:.0f} ms. host: to queue a call. GB/s: the least bytes of the "
        f"case over the kernel's median.{of_ratios} MB: memory above the inputs."
    )


# The file


class Output:
    """A JSON file that is written after every case, as a benchmark that is stopped from outside has
    no end to write at.
    """

    def __init__(self, path: Path):
        self.path = path
        self._earlier = path.read_bytes() if path.exists() else None

    def write(self, results: Results, where: dict[str, Any]) -> None:
        """Loads as shares."""
        shares = {
            name: None if load is None else round(load.share, 4)
            for name, load in results.loads.items()
        }
        data = {"conditions": where, **asdict(results), "loads": shares}
        self.path.write_text(json.dumps(data, indent=2) + "\n")

    def withdraw(self) -> None:
        """Makes the file again what it was before the run."""
        if self._earlier is not None:
            self.path.write_bytes(self._earlier)
        else:
            self.path.unlink(missing_ok=True)


def cannot_write(path: Path) -> str | None:
    """Why a file cannot be written, before there is anything to write; None if it can."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    return None
