"""Progress of a benchmark on stderr: a bar with rich, else a line for each case."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tick = Callable[[], None]
Begin = Callable[[str], Tick]
"""Says which case begins; what it returns is called after each of its rounds."""


@contextmanager
def progress(cases: int, rounds: int) -> Iterator[Begin]:
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield _plain(cases)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=cases * rounds)
        begun = 0

        def begin(case: str) -> Tick:
            nonlocal begun
            bar.update(task, completed=begun * rounds, description=case)
            begun += 1
            return lambda: bar.advance(task)

        yield begin


def _plain(cases: int) -> Begin:
    begun = 0

    def begin(case: str) -> Tick:
        nonlocal begun
        begun += 1
        print(f"[{begun}/{cases}] {case}", file=sys.stderr, flush=True)
        return lambda: None

    return begin
