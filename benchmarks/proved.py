"""Counts the tests that replace a GPU, for the tables of docs/proved.md.

Runs of the tests leave reports in JUnit's format, and this program writes
benchmarks/results/proved.json from them. ``make test-ptx`` and ``make sass`` write their counts::

    make test TEST_OPTIONS=--junit-xml=build/test.xml
    make test-rest TEST_OPTIONS="tests/gpu --junit-xml=build/rest.xml"
    python -m benchmarks.proved build/test.xml build/rest.xml
"""

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.outcome import RESULTS, provenance

INSTRUMENTS = {
    "emulator": "the CUDA source, in an emulator of a block's threads",
    "interpreter": "the Triton kernels, in Triton's own interpreter",
    "guarded": "calls on the CUDA source whose inputs end at forbidden memory",
    "launches": "launches and allocations of a call",
    "compiled": "the CUDA kernels compiled, without a spill",
    "compiled Triton": "the Triton kernels compiled, without a spill",
}
"""Instrument -> what ran."""

FILES = {
    "tests.gpu.test_launches": "launches",
    "tests.gpu.test_cuda_build": "compiled",
    "tests.gpu.test_triton_compiles": "compiled Triton",
}
"""Module of tests -> the instrument of which each of its tests is a case."""


def counts_of(reports: Sequence[Path]) -> dict[str, int]:
    """Instrument -> the cases that passed. Some tests record how many cases they are.

    Raises:
        SystemExit: a test of an instrument failed. Or an instrument has no case, as in a run of
            some tests, or without nvcc or Triton.
    """
    counts = dict.fromkeys(INSTRUMENTS, 0)
    for report, each in ((r, e) for r in reports for e in ElementTree.parse(r).iter("testcase")):
        module, name = each.get("classname", ""), each.get("name", "")
        emulated = "native-emulated" in name
        if each.find("failure") is not None or each.find("error") is not None:
            if module.startswith("tests.gpu.") or emulated:
                raise SystemExit(f"{report} is of a run in which {module}::{name} failed")
        elif each.find("skipped") is None:
            recorded = {p.get("name"): p.get("value", "") for p in each.iter("property")}
            counts["emulator"] += emulated
            counts["interpreter"] += int(recorded.get("interpreted", 0))
            counts["guarded"] += int(recorded.get("guarded", 0)) * emulated
            if module in FILES:
                counts[FILES[module]] += 1
    if missing := [name for name, count in counts.items() if not count]:
        raise SystemExit(f"the reports have no case of {', '.join(missing)}")
    return counts


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
    return [
        (
            title,
            sum(
                run["passed"]
                for name, run in ptx["runs"].items()
                if name.startswith(begins) and not name.startswith(without)
            ),
            "[`make test-ptx`](#nvccs-ptx)",
        )
        for title, begins, without in PTX
    ]


def table(counted: dict[str, Any], ptx: dict[str, Any], sass: dict[str, Any]) -> str:
    """The runs and their cases, all of which passed."""
    source = "`make test`, `make test-rest`"
    first, *others = [(INSTRUMENTS[name], n, source) for name, n in counted["cases"].items()]
    of_sass = len(sass["cases"]) + len(sass["triton"])
    by_sass = "[`make sass`](../csrc/README.md#machine-code)"
    last = ("kernels whose instructions are counted", of_sass, by_sass)
    lines = [first, *ptx_lines(ptx), *others, last]
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
    paths = [results / f"{name}.json" for name in ("proved", "ptx-coverage-sm90", "sass")]
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
    where = provenance("torch", "triton")
    data = {
        "commit": where["commit"],
        "date": where["date"][:10],
        "versions": where["versions"],
        "cases": counts_of(arguments.reports),
    }
    arguments.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
