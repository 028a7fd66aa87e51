"""The tables of a GPU before one was measured: the cases of `make gpu-check`, and no number."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import command, gpu_check, report
from benchmarks.candidates import MODES
from benchmarks.cases import Case, Suite
from benchmarks.suites import SUITES

PENDING = "*pending*"
COMMAND = "`make gpu-check PYTHON=python3`"
BUDGET = str(gpu_check.BENCH_BUDGET)


def suite_and_cases(options: list[str]) -> tuple[Suite, list[Case]]:
    """The cases that `python -m benchmarks` with these options measures on a GPU."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(options)
    suite = SUITES[arguments.suite]
    return suite, command.gpu_cases(arguments, suite)


def planned() -> dict[str, tuple[Suite, list[Case]]]:
    """Results on a GPU -> what `make gpu-check` measures for them, as its own steps say."""
    found = {}
    for phase in gpu_check.phases(Path()):
        for step in phase.steps:
            if "--out" in step.command and "benchmarks" in step.command:
                options = step.command[step.command.index("benchmarks") + 1 :]
                name = Path(options[options.index("--out") + 1]).stem
                found[name] = suite_and_cases([each.format(budget=BUDGET) for each in options])
    return found


def block(suite: Suite, cases: list[Case]) -> str:
    """A suite's table: a measured one's headings and lines, with what is there to be measured."""
    names = [{*case.op.eager(case.packed), *MODES} for case in cases]
    rivals = report.rivals_of([{name: {} for name in each} for each in names], always=())
    headings = report.kernel_headings(suite.name, rivals)
    lines = []
    for case, candidates in zip(cases, names, strict=True):
        row = {"shape": list(case.shape), "packed": case.packed, "op": case.op.name}
        cells = [PENDING if name in candidates else "" for name in rivals]
        rest = len(headings) - 2 - len(report.BACKENDS) - len(rivals)
        lines.append(
            [
                report.label(row, with_shape=True),
                case.dtype,
                *[PENDING] * len(report.BACKENDS),
                *cells,
                *[PENDING] * rest,
            ]
        )
    return (
        f"{report.table(headings, lines)}\n\n"
        f"Not measured: {COMMAND} on a machine with a GPU measures these {len(cases)} cases, "
        f"{suite.gpu_rounds} interleaved rounds of each with L2 flushed, checked against float64 "
        f"first: {suite.text}. The device, its clocks and the versions then stand here."
    )
