"""The terminal's view of the experiment while it runs and at its end. It imports rich."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from lab.answer import Answer
from lab.folder import Row
from lab.report import SpeedRow, speed_flags
from lab.settings import Settings
from lab.summary import Summary
from lab.words import number


@dataclass
class Bars:
    """A bar for the pretraining and one for each arm."""

    progress: Progress
    tasks: dict[str, TaskID]

    def show(self, pretrain_step: int, rows: list[Row]) -> None:
        """The steps that an interrupted run had already done."""
        if pretrain_step:
            self._move("pretraining", pretrain_step, "")
        for row in {row["arm"]: row for row in rows}.values():
            self.trained(row)

    def pretrained(self, step: int, loss: float) -> None:
        self._move("pretraining", step, f"loss {loss:.2f}")

    def trained(self, row: Row) -> None:
        self._move(row["arm"], row["step"], describe(row))

    def _move(self, name: str, step: int, note: str) -> None:
        task = self.tasks[name]
        if not self.progress.tasks[task].started:
            self.progress.start_task(task)
        self.progress.update(task, completed=step, note=note)


def describe(row: Row) -> str:
    return (
        f"KL {number(row['kl_per_sequence_k3'])}, exact {number(row['kl_per_sequence_exact'])}, "
        f"coef {number(row['coefficient'])}, reward {row['reward']:.0%}"
    )


@contextmanager
def progress_bars(console: Console, settings: Settings) -> Iterator[Bars]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=6),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )
    totals = {"pretraining": settings.pretrain_steps}
    totals.update(dict.fromkeys(settings.arms, settings.steps))
    with progress:
        tasks = {
            name: progress.add_task(name, total=total, start=False, note="")
            for name, total in totals.items()
        }
        yield Bars(progress, tasks)


def print_answer(console: Console, found: Answer) -> None:
    console.print(found.line, style="bold", highlight=False)
    for sentence in found.notes:
        console.print(f"- {sentence}", highlight=False)


def print_summary(console: Console, summaries: list[Summary], settings: Settings) -> None:
    table = Table(
        title=f"Last third of the steps; target {number(settings.target)} nats per sequence",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("arm", no_wrap=True)
    headings = ("reward", "KL", "exact KL", "off target", "coef", "ppl", "KL step ms")
    for heading in headings:
        table.add_column(heading, justify="right")
    for s in summaries:
        table.add_row(
            s.name,
            f"{s.reward:.1%}",
            number(s.kl),
            number(s.exact_kl),
            f"{s.miss(settings.target):+.0%}",
            number(s.coefficient),
            number(s.perplexity),
            number(s.kl_seconds * 1e3),
        )
    console.print(table)


def print_speed(console: Console, speed: list[SpeedRow]) -> None:
    table = Table(title="Speed of the KL step", title_justify="left", box=box.SIMPLE)
    table.add_column("case", min_width=len("forward+backward"))
    table.add_column("implementation", no_wrap=True)
    for heading in ("median ms", "min ms", "ratio", "flags"):
        table.add_column(heading, justify="right")
    for row in speed:
        table.add_row(
            str(row["case"]),
            str(row["impl"]),
            *(number(row[key]) for key in ("median_ms", "min_ms", "ratio")),
            speed_flags(row),
        )
    console.print(table)
