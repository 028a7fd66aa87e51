"""Reward against KL: what each arm paid for its reward, on its way and at its end."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lab.arms import on_policy
from lab.drawing import Panel, dress, label_ends, note, set_shares, set_ticks
from lab.means import mean_of, rows_by_arm
from lab.palette import INK, SHADE
from lab.plots import STYLES
from lab.settings import Settings
from lab.summary import HELD_WITHIN, Summary
from lab.train import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KL = "kl_per_sequence_k3"


def frontier_panel(rows: list[Row], summaries: list[Summary], settings: Settings) -> Panel:
    return Panel(
        "Reward against KL",
        "Reward over the KL to the reference, for each arm: a path of running means, and where it "
        "ended, with the spread from step to step. The summary has the same means.",
        partial(_draw, rows=rows, summaries=summaries, settings=settings),
    )


def path(rows: list[Row]) -> list[tuple[float, float]]:
    """(KL, reward): means over as many steps as the last one's, which is the tables'."""
    window = max(1, len(rows) // 3)
    pieces = [rows[max(0, end - window) : end] for end in range(1, len(rows) + 1)]
    points = [(mean_of(piece, _KL), mean_of(piece, "reward")) for piece in pieces]
    return [(kl, reward) for kl, reward in points if kl > 0]


def _draw(panel: Axes, rows: list[Row], summaries: list[Summary], settings: Settings) -> None:
    by_arm = rows_by_arm(rows, on_policy(settings.arms))
    ends, points = [], []
    for s in summaries:
        style = STYLES[s.name]
        way = path(by_arm[s.name])
        if not way:
            continue  # a KL of 0 has no place on a logarithmic axis
        line = {"color": style["color"], "linestyle": style["linestyle"]}
        panel.plot(*zip(*way, strict=True), linewidth=1.2, alpha=0.6, **line)
        panel.errorbar(
            s.kl,
            s.reward,
            xerr=[[min(s.kl_spread, 0.9 * s.kl)], [s.kl_spread]],
            yerr=s.reward_spread,
            elinewidth=1.0,
            markersize=8,
            label=s.name,
            **style,
        )
        ends.append((s.name, style, s.reward))
        points.append((s.kl, s.reward))
    dress(panel)
    _show_target(panel, settings, empty=not ends)
    panel.set_ylabel("reward")
    set_shares(panel.yaxis)
    label_ends(panel, ends, points)


def _show_target(panel: Axes, settings: Settings, empty: bool) -> None:
    panel.set_xlabel("KL to the reference (k3, nats per sequence)")
    panel.set_xscale("log")
    low, high = (1.0, 10.0) if empty else panel.get_xlim()
    panel.set_xlim(min(low, settings.target / 2), max(high, settings.target * 2))
    set_ticks(panel.xaxis)
    band = (settings.target * (1 - HELD_WITHIN), settings.target * (1 + HELD_WITHIN))
    panel.axvspan(*band, color=INK, alpha=SHADE, linewidth=0)
    panel.axvline(settings.target, color=INK, linewidth=1.2, zorder=1)
    note(
        panel,
        f"target {settings.target:g}",
        (settings.target, 1),
        xycoords=panel.get_xaxis_transform(),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
    )
