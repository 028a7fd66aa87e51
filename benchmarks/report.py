"""Tables from ``benchmarks/results/*.json``, in the README and pages of docs/.

This script writes numbers from those files into a page, between ``<!-- benchmark:NAME -->`` and
``<!-- end -->``. ``--check`` (a test) tells whether a page is out of date::

    python -m benchmarks.report

It also writes ``cpu.md`` and ``gpu.md`` beside the results, with every case.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, gpu_check, outcome, proved, tables
from benchmarks.cases import Case
from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[1]
PAGES = (
    *(ROOT / name for name in ("README.md", "benchmarks/README.md", "csrc/README.md")),
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "install", "measured", "proved")),
)
BLOCK = re.compile(r"(<!-- benchmark:(?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

NO_GPU = "**No GPU has run klfast yet.**"
NOT_MEASURED = "**Not measured yet.**"
SETS = ("", "-avx2", "-baseline")
"""What the name of a file ends with, by the instruction set that ran."""
PLANS = {**gpu_check.OPTIONS, **gpu_check.ALONE}


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


def planned(name: str) -> list[Case]:
    """The cases that are measured for results on a GPU."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(PLANS[name])
    return command.gpu_cases(arguments, SUITES[arguments.suite])


def load(path: Path) -> dict[str, Any] | None:
    """A results file; None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def loaded(results: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Name -> results, of the files that are there."""
    found = {name: load(results / f"{name}.json") for name in names}
    return {name: data for name, data in found.items() if data is not None}


def gpu_part(gpus: dict[str, dict[str, Any]]) -> str:
    """The part of docs/measured.md on GPUs, with measured and unmeasured cases."""
    missing = sum(len(planned(name)) for name in PLANS if name not in gpus)
    parts = [tables.gpu_details([*gpus.values()]), tables.GPU_METHOD] if gpus else [NO_GPU]
    if missing:
        parts.append(f"The benchmarks have {missing} cases for a GPU that are not measured.")
    return "\n\n".join(parts)


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


def first_devices(gpus: Iterable[Conditions], check: dict[str, Any] | None) -> str:
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


def devices(
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


def blocks(results: Path) -> dict[str, str]:
    """Name -> text of the pages' generated parts."""
    cpus = loaded(results, sorted(path.stem for path in results.glob("cpu*.json")))
    gpus = loaded(results, PLANS)
    texts = dict.fromkeys(("cpu", "cpu-step", "summary"), NOT_MEASURED)
    if "cpu-step" in cpus:
        texts["cpu-step"] = tables.block(cpus["cpu-step"])
    if cpus.keys() >= {*tables.SUMMARY}:
        texts["summary"] = tables.summary([cpus[name] for name in tables.SUMMARY])
        known = [cpus[name] for name in (*tables.SUMMARY, "cpu-topk", "cpu-linear") if name in cpus]
        texts["cpu"] = tables.summary(known, [tables.OPS] * len(known), tables.IN_ALL)
    machine_code, check = (load(results / f"{n}.json") for n in ("sass", "gpu-check"))
    if machine_code is not None:
        texts["machine-code"] = tables.machine_code_table(machine_code)
    texts["gpu"] = gpu_part(gpus)
    begin = tables.gpu_summary([*gpus.values()]) if gpus else NO_GPU
    texts["gpu-summary"] = f"{begin} See [on a GPU](docs/measured.md#on-a-gpu)."
    of_gpus = [data["conditions"] for data in gpus.values()]
    texts["first-devices"] = first_devices(of_gpus, check)
    texts["devices"] = devices([data["conditions"] for data in cpus.values()], of_gpus, check)
    if check is not None:
        where = f"The device is {check['device']}, and the commit {check['commit']}."
        texts["gpu-check"] = f"{tables.steps_table(check['steps'])}\n\n{where}"
    return texts | proved.blocks(results)


def details(results: Path) -> dict[str, str]:
    """File in the folder of the results -> its text: every case that was measured."""
    cpus = loaded(results, sorted(path.stem for path in results.glob("cpu*.json")))
    parts = {name: tables.block(data) for name, data in cpus.items()}
    of_sets = loaded(results, (f"{name}{of}" for name in tables.SUMMARY for of in SETS))
    parts["by instruction set"] = tables.by_instruction_set(of_sets.values())
    peers = sorted((path.stem for path in results.glob("drop-in-*.json")), reverse=True)
    if peers:
        parts["frameworks' functions"] = tables.drop_in_table([*loaded(results, peers).values()])
    texts = {"cpu.md": parts}
    if gpus := loaded(results, PLANS):
        texts["gpu.md"] = {name: tables.block(data) for name, data in gpus.items()}
        texts["gpu.md"]["method"] = tables.GPU_METHOD
    return {
        file: "\n\n".join(f"## {name}\n\n{text}" for name, text in parts.items()) + "\n"
        for file, parts in texts.items()
    }


def rewrite(text: str, texts: dict[str, str]) -> str:
    """A page with its generated parts brought up to date.

    Raises:
        SystemExit: it names a part that has no results.
    """

    def generated(match: re.Match[str]) -> str:
        if match["name"] not in texts:
            known = ", ".join(map(repr, sorted(texts)))
            raise SystemExit(f"no results for benchmark:{match['name']}; expected one of {known}")
        return f"{match[1]}{texts[match['name']]}\n{match[3]}"

    return BLOCK.sub(generated, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes, or with ``--check`` says whether there is something to write (1)."""
    parser = argparse.ArgumentParser(
        description="Write the tables of pages from benchmarks/results."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and return 1 if a page is out of date"
    )
    text = "the folder of the results (default benchmarks/results)"
    parser.add_argument("--results", type=Path, default=outcome.RESULTS, help=text)
    text = "the pages to write (default: all that have tables)"
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help=text)
    arguments = parser.parse_args(argv)
    parts = blocks(arguments.results)
    texts = {page: rewrite(page.read_text(), parts) for page in arguments.pages}
    texts |= {arguments.results / file: text for file, text in details(arguments.results).items()}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.name} is not what the results say: run python -m benchmarks.report")
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path])
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
