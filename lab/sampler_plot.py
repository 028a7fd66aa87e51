"""The panels of the sampler: how far it is off the policy, and what the correction changes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lab.arms import ARMS, off_policy
from lab.drawing import Panel, dress, set_shares, set_ticks, zero_line
from lab.plots import (
    draw_lines,
    draw_means,
    label_arms,
    shade_window,
    show_steps,
    step_axis,
)
from lab.sampler_summary import compared
from lab.settings import Settings
from lab.train import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def sampler_panels(rows: list[Row], settings: Settings) -> list[Panel]:
    """First the arms and their partner on the policy, then sampler and policy."""
    flat = [{**row, **row["rollout"]} for row in rows if "rollout" in row]
    for row in flat:
        row["bounded"] = row["outside"] + row["rejected_tokens"]
    names = off_policy(settings.arms)
    curve = partial(_draw_curve, rows=rows, names=compared(settings), settings=settings)
    own: dict[str, Any] = {"rows": flat, "names": names, "settings": settings}
    of_arms = "over the steps, a line for each arm off the policy and for their partner on it"
    of_sampler = "over the steps, a line for each arm off the policy"
    chosen = (
        (f"Reward: share of the letter “{settings.letter}”", of_arms, partial(curve, key="reward")),
        (
            "Exact KL to the reference (nats per sequence)",
            of_arms,
            partial(curve, key="kl_per_sequence_exact"),
        ),
        (
            "k1 with the arm's weights, off the exact KL (steps so far)",
            of_sampler,
            partial(_draw_error, **own),
        ),
        (
            "KL(rollout || policy) (k3, nats per token)",
            of_sampler,
            partial(_draw_logarithmic, key="k3", **own),
        ),
        ("Effective sample size", of_sampler, partial(_draw_share, key="ess", **own)),
        (
            f"Tokens that “{settings.correction}” bounds or rejects",
            of_sampler,
            partial(_draw_share, key="bounded", **own),
        ),
    )
    return [
        Panel(title, f"{title}, {what}. The table has its means.", draw)
        for title, what, draw in chosen
    ]


def _draw_curve(
    panel: Axes, key: str, rows: list[Row], names: list[str], settings: Settings
) -> None:
    """With the means of the table, over the last third."""
    shade_window(panel, rows, names)
    draw_means(panel, key, rows, names)
    _draw_logarithmic(panel, key, rows, names, settings)


def _draw_logarithmic(
    panel: Axes, key: str, rows: list[Row], names: list[str], settings: Settings
) -> None:
    ends = draw_lines(panel, key, rows, names, settings)
    dress(panel)
    show_steps(panel, settings, empty=not ends)
    set_ticks(panel.yaxis)
    label_arms(panel, ends)


def _draw_error(panel: Axes, rows: list[Row], names: list[str], settings: Settings) -> None:
    """The running mean of k1 against that of the exact KL, both from the sampler's tokens."""
    running = []
    for name in names:
        key = "weighted_k1" if ARMS[name].is_corrected else "kl_per_sequence_k1"
        estimate = exact = 0.0
        for row in (row for row in rows if row["arm"] == name):
            estimate, exact = estimate + row[key], exact + row["kl_per_sequence_exact"]
            if exact > 0:
                running.append({**row, "error": estimate / exact - 1})
    ends = draw_lines(panel, "error", running, names, settings, signed=True)
    zero_line(panel)
    dress(panel)
    step_axis(panel, settings)
    set_shares(panel.yaxis)
    label_arms(panel, ends)


def _draw_share(
    panel: Axes, key: str, rows: list[Row], names: list[str], settings: Settings
) -> None:
    ends = draw_lines(panel, key, rows, names, settings)
    dress(panel)
    step_axis(panel, settings)
    panel.set_ylim(bottom=0)
    set_shares(panel.yaxis)
    label_arms(panel, ends)
