"""The picture of the sampler: how far it is off the policy, and what the correction changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from klfast.experiment.arms import ARMS, off_policy
from klfast.experiment.plots import (
    add_legend,
    draw_lines,
    dress,
    label_arms,
    new_figure,
    set_ticks,
    show_steps,
    to_png,
)
from klfast.experiment.sampler_summary import compared
from klfast.experiment.settings import Settings
from klfast.experiment.train import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_sampler(rows: list[Row], settings: Settings) -> bytes:
    """Six panels as a PNG: above the arms, below sampler and policy."""
    figure = new_figure()
    figure.set_size_inches(17, 9)
    axes = figure.subplots(2, 3)
    above = (
        ("reward", f"Reward: share of the letter '{settings.letter}'"),
        ("kl_per_sequence_exact", "Exact KL to the reference (nats per sequence)"),
    )
    for panel, (key, title) in zip(axes[0], above, strict=False):
        _draw_logarithmic(panel, key, title, rows, compared(settings), settings)
    flat = [{**row, **row["rollout"]} for row in rows if "rollout" in row]
    names = off_policy(settings.arms)
    _draw_error(axes[0][2], flat, names, settings)
    title = "KL(rollout || policy) (k3, nats per token)"
    _draw_logarithmic(axes[1][0], "k3", title, flat, names, settings)
    _draw_share(axes[1][1], "ess", "Effective sample size", flat, names, settings)
    for row in flat:
        row["bounded"] = row["outside"] + row["rejected_tokens"]
    title = f"Tokens that “{settings.correction}” bounds or rejects"
    _draw_share(axes[1][2], "bounded", title, flat, names, settings)
    add_legend(figure, axes[0][0])
    return to_png(figure)


def _draw_logarithmic(
    panel: Axes, key: str, title: str, rows: list[Row], names: list[str], settings: Settings
) -> None:
    ends = draw_lines(panel, key, rows, names, settings)
    dress(panel, title)
    show_steps(panel, settings, empty=not ends)
    set_ticks(panel.yaxis)
    label_arms(panel, ends)


def _draw_error(panel: Axes, rows: list[Row], names: list[str], settings: Settings) -> None:
    """The running mean of k1 against that of the exact KL, both from the sampler's tokens."""
    from matplotlib.ticker import PercentFormatter

    running = []
    for name in names:
        key = "weighted_k1" if ARMS[name].is_corrected else "kl_per_sequence_k1"
        estimate = exact = 0.0
        for row in (row for row in rows if row["arm"] == name):
            estimate, exact = estimate + row[key], exact + row["kl_per_sequence_exact"]
            if exact > 0:
                running.append({**row, "error": estimate / exact - 1})
    ends = draw_lines(panel, "error", running, names, settings, signed=True)
    panel.axhline(0, color="black", linewidth=1.2, zorder=1)
    dress(panel, "k1 with the arm's weights, off the exact KL (steps so far)")
    panel.set_xlabel("step")
    panel.set_xlim(0, settings.steps * 1.01)
    panel.yaxis.set_major_formatter(PercentFormatter(1))
    label_arms(panel, ends)


def _draw_share(
    panel: Axes, key: str, title: str, rows: list[Row], names: list[str], settings: Settings
) -> None:
    from matplotlib.ticker import PercentFormatter

    ends = draw_lines(panel, key, rows, names, settings)
    dress(panel, title)
    panel.set_xlabel("step")
    panel.set_xlim(0, settings.steps * 1.01)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(PercentFormatter(1))
    label_arms(panel, ends)
