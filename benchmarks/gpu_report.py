"""The conditions and the table of a benchmark on a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.cases import Suite
from benchmarks.gpu import Ceilings, GpuPlan
from benchmarks.gpu_timing import GRAPH_CALLS, LONG_CALL
from benchmarks.outcome import (
    Results,
    cpu_model,
    now,
    print_results,
    version,
    versions,
)
from benchmarks.table import Column
from klfast.provenance import commit

COLUMNS = (
    Column("impl", lambda row: row.impl),
    Column("kernel us", lambda row: f"{row.kernel_ms * 1e3:.4g}"),
    Column("min us", lambda row: f"{row.kernel_min_ms * 1e3:.4g}"),
    Column("ratio", lambda row: "" if row.ratio is None else f"{row.ratio:.3g}x", compares=True),
    Column("graph us", lambda row: "-" if row.graph_ms is None else f"{row.graph_ms * 1e3:.4g}"),
    Column("host us", lambda row: f"{row.host_ms * 1e3:.4g}"),
    Column("GB/s", lambda row: f"{row.gb_per_s:.1f}"),
    Column("of read", lambda row: f"{row.read_share:.0%}", compares=True),
    Column("of copy", lambda row: f"{row.copy_share:.0%}", compares=True),
    Column("MB", lambda row: f"{row.peak_bytes / 1e6:.4g}"),
)

_CLOCKS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
)


def gpu_conditions(
    place: torch.device, plan: GpuPlan, ceilings: Ceilings, suite: Suite, quick: bool = False
) -> dict[str, Any]:
    """Where, when and how it is measured. To be asked for while the clocks are still up.

    ``quick``: whether that is too little for ratios.
    """
    return {
        "date": now(),
        **device_facts(place),
        "clocks": clocks(place),
        "host": {"processor": cpu_model(), "cores": os.cpu_count()},
        "versions": {**versions(), "triton": version("triton"), "cuda": torch.version.cuda},
        "commit": commit(),
        "suite": suite.name,
        **suite.facts,
        "quick": quick,
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
    """What nvidia-smi says of the driver, the clocks, the heat and the power; None without it."""
    if place.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader"]
    command += ["--id", f"GPU-{torch.cuda.get_device_properties(place).uuid}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    values = done.stdout.strip().split(", ")
    return dict(zip(_CLOCKS, values, strict=False))


def gpu_summary(where: dict[str, Any], suite: Suite) -> str:
    """The conditions in one paragraph."""
    named = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    ceilings = where["ceilings"]
    of_ratios = (
        ""
        if where["quick"]
        else f" of read, of copy: of {ceilings['read_gb_per_s']:.0f} GB/s read and "
        f"{ceilings['copy_gb_per_s']:.0f} GB/s copied in the same run, where no call took "
        f"{ceilings['nothing_us']:.2g} us. ratio: the kernel's median over the first line's."
    )
    return (
        f"{where['device']}, clocks {where['clocks']}; {named}, commit {where['commit']}; "
        f"{where['date']}. {suite.text}; {where['rounds']} interleaved rounds. kernel: on the "
        f"device, L2 flushed. graph: per call in a CUDA graph "
        f"of {where['graph_calls']}, inputs in L2 where they fit; for calls of less than "
        f"{LONG_CALL * 1e3:.0f} ms. host: to queue a call. GB/s: the "
        f"least bytes of the case over the kernel's median.{of_ratios} MB: memory above the inputs."
    )


def print_gpu_results(results: Results, where: dict[str, Any], suite: Suite) -> None:
    """The table, what was left out and why, and the conditions."""
    print_results(results, where, gpu_summary(where, suite), COLUMNS)
