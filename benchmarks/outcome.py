"""The outcome of a benchmark: its conditions, a table on the terminal, JSON."""

import datetime
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import idle, memory, tables
from benchmarks.cases import Suite
from benchmarks.measure import Ceilings, Plan, is_noisy_row
from benchmarks.timing import GRAPH_CALLS, NOISY
from klfast import info
from klfast.backends.info import commit

RESULTS = Path(__file__).parent / "results"

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

    rows: list[dict[str, Any]] = field(default_factory=list)
    probes: dict[str, str] = field(default_factory=dict)
    loads: dict[str, idle.Load | None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    finished: bool = False


def provenance(*names: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """When, on which processor, and of which commit and versions something is measured.

    ``packages`` are those whose versions klfast does not know, of which the installed are named.
    """
    known = info()["versions"]
    found = {name: known[name] for name in names}
    found |= {name: metadata.version(name) for name in packages if importlib.util.find_spec(name)}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "device": cpu_model(), "versions": found, "commit": commit()}


def conditions(plan: Plan, packages: Sequence[str] = ()) -> dict[str, Any]:
    """The machine, time and settings of a measurement on a CPU."""
    return {
        **provenance("klfast", "torch", "python", packages=packages),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": info()["cpu"],
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        "rounds": plan.rounds,
        "inputs": "reused" if plan.reused else "rotated",
        "memory": memory.KEPT if plan.keeps_memory else memory.GIVEN_BACK,
    }


def gpu_conditions(place: torch.device, plan: Plan, ceilings: Ceilings) -> dict[str, Any]:
    """The same on a GPU. To be asked for while the clocks are still up."""
    return {
        **provenance("klfast", "torch", "python", "triton", "cuda"),
        **_device_facts(place),
        "host": {"processor": cpu_model(), "cores": os.cpu_count()},
        "rounds": plan.rounds,
        "graph_calls": GRAPH_CALLS,
        "budget_s": plan.budget,
        "ceilings": asdict(ceilings),
    }


def _device_facts(place: torch.device) -> dict[str, Any]:
    """The name, the measures and the clocks of the chip; without a GPU, the processor's name."""
    if place.type != "cuda":
        return {"device": cpu_model(), "clocks": None}
    properties = torch.cuda.get_device_properties(place)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "clocks": _clocks(properties),
    }


def _clocks(properties: Any) -> dict[str, str] | None:
    """The driver, clocks, temperature and power that nvidia-smi reports, or None without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader"]
    command += ["--id", f"GPU-{properties.uuid}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(zip(_CLOCKS, found.strip().split(", "), strict=False))


def load_conditions(results: Results, allowed: bool) -> dict[str, Any]:
    """The share of the cores' time that other processes took in all rounds, and whether more was
    allowed; the share is None where it is not known.
    """
    known = [load for load in results.loads.values() if load is not None]
    share = idle.total(known).share if len(known) == len(results.loads) else None
    return {"others_share": None if share is None else round(share, 4), "load_allowed": allowed}


def loaded_text(loads: Mapping[str, idle.Load | None]) -> str | None:
    """The load that results were measured under; None if the machine was idle."""
    if None in loads.values():
        return "this system does not say how much time other processes take"
    known = {name: load for name, load in loads.items() if load is not None}
    busy = [name for name, load in known.items() if not load.is_idle]
    total = idle.total(known.values())
    if not busy and total.is_idle:
        return None
    most = max(busy or known, key=lambda name: known[name].share)
    return (
        f"other processes took {total.share:.0%} of the cores' time, {known[most].share:.0%} "
        f"in {most}, and more than {idle.LIMIT:.0%} in {len(busy)} of {len(known)} cases"
    )


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def print_results(results: Results, where: dict[str, Any], suite: Suite, device: str) -> None:
    """Prints the table of docs/measured.md, then flags, skipped cases, conditions and the load."""
    data = {"conditions": where, **to_json(results)}
    impls: dict[str, list[str]] = {}
    for row in results.rows:
        impls.setdefault(row["case"], []).append(row["impl"])
    if where["quick"]:
        for case, names in impls.items():
            print(f"{case}: {', '.join(names)}")
        print("--quick shows that it works. Its rounds are too few for times and ratios.")
    elif results.rows:
        print(tables.result_table(data))
    noisy = [f"{row['case']} {row['impl']}" for row in results.rows if is_noisy_row(row)]
    busy = [name for name, load in results.loads.items() if load is not None and not load.is_idle]
    for flag, names, what in (
        (NOISY_FLAG, noisy, f"the median is {NOISY:g} times the minimum or more. Measure again"),
        (BUSY_FLAG, busy, f"other processes took more than {idle.LIMIT:.0%} of the cores' time"),
    ):
        if names:
            print(f"{flag}: {what}: {', '.join(names)}")
    for what, cases in (("left out", results.skipped), ("failed", results.failed)):
        for case, reason in cases.items():
            print(f"{what}: {case}: {reason}")
    for note in results.notes:
        print(note)
    print(f"{suite.text}; {', '.join(f'{name} {value}' for name, value in where.items())}")
    if device == "cpu":
        loaded, share = loaded_text(results.loads), where["others_share"]
        if loaded is not None:
            print(f"NOT IDLE: {loaded}. These numbers are not to be published.")
        else:
            verdict = "idle" if share <= idle.LIMIT else "too short to tell whether it was idle"
            print(f"{verdict}: other processes took {share:.1%} of the cores' time.")


def to_json(results: Results) -> dict[str, Any]:
    """Plain data, with loads as shares."""
    shares = {
        name: None if load is None else round(load.share, 4) for name, load in results.loads.items()
    }
    return {**asdict(results), "loads": shares}


def write_json(path: Path, where: dict[str, Any], **data: Any) -> None:
    """Writes results. It is called after every case, as a run may be stopped from outside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": where, **data}, indent=2) + "\n")


def cannot_write(path: Path) -> str | None:
    """Why a file cannot be written, before there is anything to write; None if it can."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    return None
