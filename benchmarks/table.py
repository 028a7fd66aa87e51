"""The table of a benchmark on the terminal, and what is flagged in it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import idle
from benchmarks.timing import NOISY
from klfast.selfcheck.command import print_plainly

NOISY_FLAG, BUSY_FLAG = "noisy", "busy"
FLAGS = "flags"
"""The heading of the last column."""


@dataclass(frozen=True)
class Column:
    """A heading and the text of a row's cell.

    ``compares``: whether it holds one time against another, which takes more rounds than
    ``--quick`` has.
    """

    heading: str
    text: Callable[[Any], str]
    compares: bool = False


def flags(row: Any, loads: Mapping[str, idle.Load | None]) -> str:
    """What speaks against a row's times: their spread, and the load beside its case."""
    load = loads.get(row.case)
    return flags_text(row.is_noisy, load is not None and not load.is_idle)


def flags_text(noisy: bool, busy: bool) -> str:
    """The cell of the column."""
    return ", ".join([NOISY_FLAG] * noisy + [BUSY_FLAG] * busy)


def print_rows(
    rows: Sequence[Any],
    columns: Sequence[Column],
    loads: Mapping[str, idle.Load | None],
    quick: bool,
) -> None:
    """The rows, a case's name on the first of them; what is flagged and left out is said below."""
    shown = [column for column in columns if not (quick and column.compares)]
    cases = [""] + [row.case for row in rows]
    flagged = [flags(row, loads) for row in rows]
    lines = [
        (row.case if row.case != before else "", *(column.text(row) for column in shown), flag)
        for row, before, flag in zip(rows, cases, flagged, strict=False)
    ]
    print_table(("case", *(column.heading for column in shown), FLAGS), lines)
    for sentence in _notes(flagged, quick):
        print(sentence)


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


def print_table(headings: Sequence[str], lines: Sequence[tuple[str, ...]]) -> None:
    """With rich on a terminal, else plainly: rich would cut lines to the width of no terminal."""
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        print_plainly([tuple(headings), *lines])
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_edge=False, padding=0)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for number, line in enumerate(lines):
        table.add_row(*line, end_section=number + 1 == len(lines) or bool(lines[number + 1][0]))
    Console().print(table)
