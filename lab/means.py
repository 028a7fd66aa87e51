"""What the means of a run are over, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lab.arms import ARMS
from lab.train import Row


@dataclass(frozen=True)
class Ending:
    """How one arm ended: means over the last third of its steps.

    Attributes:
        steps: how many it has made.
        window: how many the means are over.
        exact_kl: to the reference, over the whole vocabulary, nats per sequence.
        perplexity: of held-out text, per token.
    """

    name: str
    label: str
    steps: int
    window: int
    reward: float
    exact_kl: float
    perplexity: float


def ending_of(name: str, rows: Sequence[Row]) -> Ending:
    last = last_third(rows)
    return Ending(
        name=name,
        label=ARMS[name].label,
        steps=len(rows),
        window=len(last),
        reward=mean_of(last, "reward"),
        exact_kl=mean_of(last, "kl_per_sequence_exact"),
        perplexity=mean_of(last, "held_out_perplexity"),
    )


def rows_by_arm(rows: Iterable[Row], names: Iterable[str]) -> dict[str, list[Row]]:
    """The rows of these arms."""
    by_arm: dict[str, list[Row]] = {name: [] for name in names}
    for row in rows:
        if row["arm"] in by_arm:
            by_arm[row["arm"]].append(row)
    return by_arm


def last_third(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows that an arm's means are over, in text, tables and pictures."""
    return rows[-max(1, len(rows) // 3) :]


def window_of(rows: Sequence[Row]) -> tuple[int, int]:
    """The first and the last step of them."""
    last = last_third(rows)
    return last[0]["step"], last[-1]["step"]


def mean_of(rows: Iterable[Row], key: str) -> float:
    return fmean(row[key] for row in rows)


def number(value: float) -> str:
    """Three significant digits, without an exponent where people read numbers."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"
