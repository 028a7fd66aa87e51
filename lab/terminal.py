"""The terminal's view of the experiment while it runs and at its end. It imports rich."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
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

LINE_SECONDS = 5.0
"""The time between the lines of a bar, without a terminal."""

_ALL = "all"
_ARM_STEP = 2.0  # pretraining steps that take as long as one step of an arm


@dataclass
class Bars:
    """A bar for the pretraining, for each arm and for all; lines where there is no terminal."""

    progress: Progress
    tasks: dict[str, TaskID]
    said: dict[str, float] = field(default_factory=dict)

    def show(self, pretrain_step: int, rows: list[Row]) -> None:
        """The steps that an interrupted run had already done."""
        if pretrain_step:
            self._move("pretraining", pretrain_step, "")
        for row in {row["arm"]: row for row in rows}.values():
            self.trained(row)
        done = self.progress.tasks[self.tasks[_ALL]].completed
        self.progress.reset(self.tasks[_ALL], completed=int(done))  # leaves them out of the speed

    def pretrained(self, step: int, loss: float) -> None:
        self._move("pretraining", step, f"loss {loss:.2f}")

    def trained(self, row: Row) -> None:
        self._move(row["arm"], row["step"], describe(row))

    def _move(self, name: str, step: int, note: str) -> None:
        task, whole = (self.progress.tasks[self.tasks[each]] for each in (name, _ALL))
        if not task.started:
            self.progress.start_task(task.id)
        cost = 1.0 if name == "pretraining" else _ARM_STEP
        self.progress.advance(whole.id, cost * (step - task.completed))
        self.progress.update(task.id, completed=step, note=note)
        left = "" if not whole.time_remaining else f"about {duration(whole.time_remaining)} left"
        self.progress.update(whole.id, note=left)
        now = time.monotonic()
        if self.progress.disable and (
            step == task.total or now - self.said.get(name, -math.inf) >= LINE_SECONDS
        ):
            self.said[name] = now
            text = ", ".join(filter(None, [f"{name}: step {step} of {task.total:.0f}", note, left]))
            self.progress.console.print(text, soft_wrap=True, highlight=False)


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


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
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )
    totals = {"pretraining": settings.pretrain_steps}
    totals.update(dict.fromkeys(settings.arms, settings.steps))
    everything = settings.pretrain_steps + _ARM_STEP * settings.steps * len(settings.arms)
    with progress:
        tasks = {
            name: progress.add_task(name, total=total, start=name == _ALL, note="")
            for name, total in {**totals, _ALL: everything}.items()
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
