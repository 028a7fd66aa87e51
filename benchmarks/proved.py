"""Counts the tests that replace a GPU, for the tables of docs/proved.md.

Runs of the tests leave reports in JUnit's format, and this program writes
benchmarks/results/proved.json from them. ``make test-ptx`` and ``make sass`` write their counts::

    make test TEST_OPTIONS=--junit-xml=build/test.xml
    make test-rest TEST_OPTIONS="tests/gpu --junit-xml=build/rest.xml"
    python -m benchmarks.proved build/test.xml build/rest.xml
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.outcome import RESULTS, provenance


class Case(NamedTuple):
    """A test that passed: its file's module, its name, and the numbers that it recorded."""

    module: str
    name: str
    recorded: dict[str, int]

    def count(self, name: str) -> int:
        return self.recorded.get(name, 0)


def _in(*modules: str) -> Callable[[Case], int]:
    return lambda case: case.module in {f"tests.gpu.{module}" for module in modules}


INSTRUMENTS: dict[str, tuple[str, Callable[[Case], int]]] = {
    "emulator": (
        "the CUDA source, in an emulator of a block's threads",
        lambda case: "native-emulated" in case.name,
    ),
    "interpreter": (
        "the Triton kernels, in Triton's own interpreter",
        lambda case: case.count("interpreted"),
    ),
    "guarded": (
        "calls on the CUDA source whose inputs end at forbidden memory",
        lambda case: case.count("guarded") * ("native-emulated" in case.name),
    ),
    "launches": ("launches and allocations of a call", _in("test_launches")),
    "compiled": ("the CUDA kernels compiled, without a spill", _in("test_cuda_build")),
    "compiled Triton": (
        "the Triton kernels compiled, without a spill",
        _in("test_triton_compiles"),
    ),
}
"""Instrument -> what ran, and how many of its cases a test is."""


def cases_of(report: Path) -> list[Case]:
    """The tests of a report that passed.

    Raises:
        SystemExit: a test of an instrument failed.
    """
    found = []
    for each in ElementTree.parse(report).getroot().iter("testcase"):
        module, name = each.get("classname", ""), each.get("name", "")
        if each.find("failure") is not None or each.find("error") is not None:
            if module.startswith("tests.gpu.") or "native-emulated" in name:
                raise SystemExit(f"{report} is of a run in which {module}::{name} failed")
        elif each.find("skipped") is None:
            recorded = {p.get("name", ""): p.get("value", "") for p in each.iter("property")}
            numbers = {name: int(value) for name, value in recorded.items() if value.isdigit()}
            found.append(Case(module, name, numbers))
    return found


def counts_of(cases: Sequence[Case]) -> dict[str, int]:
    """Instrument -> cases.

    Raises:
        SystemExit: an instrument has none, as in a run of some tests, or without nvcc or Triton.
    """
    counts: Counter[str] = Counter()
    for case in cases:
        for name, (_, count) in INSTRUMENTS.items():
            counts[name] += int(count(case))
    missing = [name for name in INSTRUMENTS if not counts[name]]
    if missing:
        raise SystemExit(f"the reports have no case of {', '.join(missing)}")
    return dict(counts)


PTX = (
    ("nvcc's PTX for sm_90, in an interpreter", "", ("sm_90, Triton", "faults", "sm_80", "sm_100")),
    ("nvcc's PTX for sm_80, in an interpreter", "sm_80", ()),
    ("nvcc's PTX for sm_100, in an interpreter", "sm_100", ()),
    ("Triton's PTX for sm_90, in an interpreter", "sm_90, Triton", ()),
    ("faults put into the source, which the interpreter must report", "faults", ()),
)
"""(What ran, how the names of its parts begin, and how they do not), of ``make test-ptx``."""


def ptx_lines(ptx: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(What ran, cases, where the count is from) of the parts of ``make test-ptx``."""
    source = "[`make test-ptx`](#nvccs-ptx)"
    lines = []
    for title, begins, without in PTX:
        names = [name for name in ptx["runs"] if name.startswith(begins)]
        chosen = [name for name in names if not without or not name.startswith(without)]
        lines.append((title, sum(ptx["runs"][name]["passed"] for name in chosen), source))
    return lines


def table(counted: dict[str, Any], ptx: dict[str, Any], sass: dict[str, Any]) -> str:
    """The runs and their cases, all of which passed."""
    source = "`make test`, `make test-rest`"
    first, *others = [(INSTRUMENTS[name][0], n, source) for name, n in counted["cases"].items()]
    of_sass = len(sass["cases"]) + len(sass["triton"])
    lines = [
        *(first, *ptx_lines(ptx), *others),
        (
            "kernels whose instructions are counted",
            of_sass,
            "[`make sass`](../csrc/README.md#machine-code)",
        ),
    ]
    rows = [[what, f"{count:,}", where] for what, count, where in lines]
    return (
        f"{tables.table(['what ran', 'cases', 'counted by'], rows)}\n\n"
        f"All passed: the PTX on {ptx['date']} at commit {ptx['commit'][:7]}, the others on "
        f"{counted['date']} at commit {counted['commit'][:7]}, with {tables.versions(counted)}, "
        f"nvcc {ptx['nvcc']}."
    )


def not_reached(ptx: dict[str, Any]) -> str:
    """How many of the instructions have run, and why the others have not."""
    rows = [[f"{count:,}", reason] for reason, count in ptx["not_reached"]["reasons"].items()]
    return (
        f"{ptx['reached']:,} of the {ptx['instructions']:,} instructions of {ptx['arch']} "
        f"have run ({100 * ptx['share']:.1f} %, {ptx['date']}). The others:\n\n"
        f"{tables.table(['instructions', 'why they have not run'], rows)}"
    )


def summary(counted: dict[str, Any], ptx: dict[str, Any]) -> str:
    """The README's sentences."""
    cases = sum(count for title, count, _ in ptx_lines(ptx) if title.startswith("nvcc"))
    of = counted["cases"]
    return (
        f"An interpreter runs the compiled CUDA code (PTX) without a GPU: {cases:,} test cases "
        f"covered {100 * ptx['share']:.0f} % of its instructions for {ptx['arch']} on "
        f"{ptx['date']}. The CUDA source ran in an emulator ({of['emulator']:,} cases), and the "
        f"Triton kernels in Triton's interpreter ({of['interpreter']:,} cases), on "
        f"{counted['date']}. Every result is compared with float64 or with the CPU kernels."
    )


def blocks(results: Path) -> dict[str, str]:
    """Name -> text of the pages' generated parts; none where a file is missing."""
    paths = [results / f"{name}.json" for name in ("proved", "ptx-coverage-sm90", "sass-sm90")]
    if not all(path.exists() for path in paths):
        return {}
    counted, ptx, sass = (json.loads(path.read_text()) for path in paths)
    return {
        "proved": table(counted, ptx, sass),
        "proved-coverage": not_reached(ptx),
        "proved-summary": summary(counted, ptx),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count the tests that stand in for a GPU.")
    parser.add_argument("reports", type=Path, nargs="+", help="reports of pytest --junit-xml")
    text = "the file to write (default benchmarks/results/proved.json)"
    parser.add_argument("--out", type=Path, default=RESULTS / "proved.json", help=text)
    arguments = parser.parse_args(argv)
    cases = [case for report in arguments.reports for case in cases_of(report)]
    where = provenance("torch", "triton")
    data = {
        "commit": where["commit"],
        "date": where["date"][:10],
        "versions": where["versions"],
        "cases": counts_of(cases),
    }
    arguments.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
