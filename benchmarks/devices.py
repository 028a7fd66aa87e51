"""The tables of devices in the README and in docs/install.md.

The benchmarks' results and ``gpu-check.json`` say what a GPU ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import tables

Conditions = dict[str, Any]

COMPILED = "compiled, never run"
GPUS = {
    8: "NVIDIA A100 and other GPUs of compute capability 8.x (RTX 30 and 40)",
    9: "NVIDIA H100, H200 (9.0)",
    10: "NVIDIA B200 (10.0)",
    12: "NVIDIA RTX 50 (12.0)",
}
"""Compute capability -> the GPUs that have CUDA kernels."""

VERSIONS = {
    # name: (those that are tested, all that are supported)
    "Python": (("3.11",), ("3.10", "3.11", "3.12", "3.13", "3.14")),
    "torch": (("2.10", "2.13", "2.15"), ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")),
}

BAD = {"failed": "failed", "timeout": "ran out of time", "not run": "did not run"}
"""The outcome of a step of ``make gpu-check`` -> the words for it."""


def ran(where: Conditions, check: dict[str, Any] | None, page: str) -> str:
    """The commit that a GPU ran, and the outcome of ``make gpu-check``."""
    versions = where["versions"]
    text = (
        f"ran commit {where['commit']} on {where['date'][:10]} (Python {versions['python']}, torch "
        f"{versions['torch']})"
    )
    if check is None or check["commit"] != where["commit"]:
        return text
    steps = {status: [s["name"] for s in check["steps"] if s["status"] == status] for status in BAD}
    bad = [f"{listed(names)} {BAD[status]}" for status, names in steps.items() if names]
    found = "; ".join(bad) or "all checks passed"
    return f"{text}: {found} ([the checks, and what was mended since]({page}#the-checks))"


def first_table(gpus: Iterable[Conditions], check: dict[str, Any] | None) -> str:
    """The README's table."""
    (pythons, every), (torches, _) = VERSIONS["Python"], VERSIONS["torch"]
    found = {where["device"]: where for where in gpus}
    rest = "other NVIDIA GPUs" if found else "NVIDIA GPUs"
    cpu = f"Linux x86-64 CPUs, Python {every[0]} to {every[-1]}, torch {torches[0]} or later"
    rows = [
        (cpu, f"tested with Python {listed(pythons)} and torch {listed(torches)}"),
        *((name, ran(each, check, "docs/measured.md")) for name, each in found.items()),
        (f"{rest} from A100 on; AMD GPUs through Triton", COMPILED),
        ("Linux aarch64 CPUs", "tested under qemu only"),
        ("macOS, Windows", "never built"),
        (f"torch before {torches[0]}", "not supported"),
    ]
    return tables.table(("runs on", "state"), rows)


def table(
    cpus: Iterable[Conditions], gpus: Sequence[Conditions], check: dict[str, Any] | None
) -> str:
    """The table of docs/install.md."""
    sets = listed([*dict.fromkeys(where["instruction_set"] for where in cpus)])
    rows = [("Linux x86-64 CPU", f"tested and [measured](measured.md) with {sets}", "`native`")]
    found = {int(where["capability"].split(".")[0]): where for where in gpus}
    for capability, name in GPUS.items():
        where = found.get(capability)
        state = COMPILED
        if where is not None:
            state = f"{where['device']} {ran(where, check, 'measured.md')}"
        rows.append((name, state, "`native`, `triton`"))
    for name, (tested, every) in VERSIONS.items():
        rows.append((f"{name} {listed(tested)}", "tested", ""))
        seen = {short(where["versions"][name.lower()]): where["device"] for where in gpus}
        rows += [(f"{name} {v}", f"ran on {on}", "") for v, on in seen.items() if v not in tested]
        rest = [version for version in every if version not in {*tested, *seen}]
        rows += [(f"{name} {listed(rest)}", "supported, not checked", "")] if rest else []
    return tables.table(("yours", "state", "backend"), rows)


def short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
