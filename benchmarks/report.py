"""Tables from ``benchmarks/results/*.json``, in the README and pages of docs/.

This script writes numbers from those files into a page, between ``<!-- benchmark:NAME -->`` and
``<!-- end -->``. ``--check`` (a test) tells whether a page is out of date::

    python -m benchmarks.report

With a ``gpu.json``, ``gpu-logits.json``, ``gpu-topk.json`` or ``gpu-linear.json`` it also writes
``gpu.md`` with all their cases.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, devices, gpu_plan, outcome, proved, tables
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
PLANS = {**gpu_plan.OPTIONS, **gpu_plan.ALONE}


def planned() -> dict[str, list[Case]]:
    """Results on a GPU -> the cases that are measured for them."""
    found = {}
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for name, options in PLANS.items():
        arguments = parser.parse_args(options)
        found[name] = command.gpu_cases(arguments, SUITES[arguments.suite])
    return found


def gpu_results(results: Path) -> dict[str, dict[str, Any]]:
    """Name -> the results measured on a GPU."""
    found = {name: load(results / f"{name}.json") for name in PLANS}
    return {name: data for name, data in found.items() if data is not None}


def gpu_part(results: Path) -> str:
    """The part of docs/measured.md on GPUs, with measured and unmeasured cases."""
    measured = gpu_results(results)
    missing = sum(len(cases) for name, cases in planned().items() if name not in measured)
    parts = [tables.gpu_block(data) for data in measured.values()] or [NO_GPU]
    parts += [tables.GPU_METHOD] if measured else []
    if missing:
        parts.append(f"The benchmarks have {missing} cases for a GPU that are not measured.")
    return "\n\n".join(parts)


def gpu_summary(results: Path) -> str:
    """The README's table of a GPU."""
    measured = [*gpu_results(results).values()]
    begin = tables.gpu_summary(measured) if measured else NO_GPU
    return f"{begin} See [on a GPU](docs/measured.md#on-a-gpu)."


def load(path: Path) -> dict[str, Any] | None:
    """A results file; None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def blocks(results: Path) -> dict[str, str]:
    """Name -> text of the pages' generated parts."""
    texts = dict.fromkeys(
        ("cpu-logits", "cpu-topk", "cpu-linear", "cpu-step", "summary"), NOT_MEASURED
    )
    for path in results.glob("cpu*.json"):
        texts[path.stem] = tables.cpu_block(json.loads(path.read_text()))
    drop_in = sorted(results.glob("drop-in-*.json"), reverse=True)
    if drop_in:
        texts["drop-in"] = tables.drop_in_table([json.loads(path.read_text()) for path in drop_in])
    parts = [load(results / f"{name}.json") for name in tables.SUMMARY]
    known = [part for part in parts if part is not None]
    if len(known) == len(tables.SUMMARY):
        texts["summary"] = tables.summary(known)
    newest = load(results / "cpu-logits-zen4.json")
    if newest is not None:
        texts["cpu-logits-zen4"] = tables.summary([newest], [tables.OPS])
    of_sets = [load(results / f"{name}{of}.json") for name in tables.SUMMARY for of in SETS]
    texts["instruction-sets"] = tables.by_instruction_set(filter(None, of_sets))
    machine_code = load(results / "sass-sm90.json")
    if machine_code is not None:
        texts["machine-code"] = tables.machine_code_table(machine_code)
    texts["gpu"] = gpu_part(results)
    texts["gpu-summary"] = gpu_summary(results)
    check = load(results / "gpu-check.json")
    cpus = [(load(path) or {})["conditions"] for path in sorted(results.glob("cpu*.json"))]
    gpus = [data["conditions"] for data in gpu_results(results).values()]
    texts["first-devices"] = devices.first_table(gpus, check)
    texts["devices"] = devices.table(cpus, gpus, check)
    if check is not None:
        where = f"The device is {check['device']}, and the commit {check['commit']}."
        texts["gpu-check"] = f"{tables.steps_table(check['steps'])}\n\n{where}"
    return texts | proved.blocks(results)


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
    gpu = gpu_results(arguments.results)
    if gpu:
        everything = [tables.gpu_block(data, only_some=False) for data in gpu.values()]
        texts[arguments.results / "gpu.md"] = "\n\n".join([*everything, tables.GPU_METHOD]) + "\n"
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
