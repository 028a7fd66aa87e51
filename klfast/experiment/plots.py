"""The curves of the arms on the policy: four panels that read in colour, in grey and for a
colour-blind eye.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from klfast.experiment.arms import ARMS, on_policy
from klfast.experiment.settings import Settings
from klfast.experiment.summary import number
from klfast.experiment.train import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Styles = dict[str, dict[str, Any]]

# Okabe and Ito's palette; each arm has its own line and marker as well.
_STYLES: Styles = {
    "none": {"color": "#555555", "linestyle": ":", "marker": "x"},
    "fixed-low": {"color": "#E69F00", "linestyle": "--", "marker": "v"},
    "fixed-high": {"color": "#56B4E9", "linestyle": "--", "marker": "^"},
    "adaptive": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "exponential": {"color": "#D55E00", "linestyle": "-", "marker": "s"},
    "nupi": {"color": "#009E73", "linestyle": "-", "marker": "D"},
    "pid": {"color": "#CC79A7", "linestyle": "-", "marker": "P"},
    "dual": {"color": "#000000", "linestyle": "-", "marker": "*"},
    "doubling": {"color": "#E69F00", "linestyle": "-.", "marker": "<"},
    "control-vae": {"color": "#56B4E9", "linestyle": "-.", "marker": ">"},
    "stale": {"color": "#D55E00", "linestyle": "-", "marker": "X"},
    "corrected": {"color": "#009E73", "linestyle": "-", "marker": "d"},
}
_MARKERS_PER_LINE = 8
_PERPLEXITY_CAP = 5  # times the first step's; beyond, arms that keep their fluency look all alike
_LABEL_GAP = 0.055  # between the labels at the lines' ends, as a share of the panel's height


def draw_curves(rows: list[Row], settings: Settings) -> bytes:
    """The four panels as a PNG."""
    figure = new_figure()
    axes = figure.subplots(2, 2)
    zero = " (no penalty: 0)" if "none" in settings.arms else ""
    panels = (
        (axes[0][0], "reward", f"Reward: share of the letter '{settings.letter}'"),
        (axes[0][1], "kl_per_sequence_k3", "KL to the reference (k3, nats per sequence)"),
        (axes[1][0], "coefficient", f"Coefficient of the KL penalty{zero}"),
        (axes[1][1], "held_out_perplexity", "Perplexity of held-out text (per token)"),
    )
    for panel, key, title in panels:
        ends = draw_lines(panel, key, rows, on_policy(settings.arms), settings)
        dress(panel, title)
        show_steps(panel, settings, empty=not ends)
        if key == "kl_per_sequence_k3":
            _mark_target(panel, settings)
        if key == "held_out_perplexity" and rows:
            ends = _cap(panel, ends, _PERPLEXITY_CAP * rows[0][key])
        set_ticks(panel.yaxis)
        label_arms(panel, ends)
    add_legend(figure, axes[0][0])
    return to_png(figure)


def new_figure() -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(13, 9), dpi=110, layout="constrained")


def add_legend(figure: Figure, panel: Axes) -> None:
    """One legend for the figure, of the lines in ``panel``."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=len(labels),
        frameon=False,
        handlelength=4,
    )


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def draw_lines(
    panel: Axes,
    key: str,
    rows: list[Row],
    names: list[str],
    settings: Settings,
    signed: bool = False,
) -> list[tuple[str, float]]:
    """One line per arm; returns each arm's last value.

    Values that a logarithmic axis cannot show are left out, unless they are ``signed``.
    """
    ends = []
    for i, name in enumerate(names):
        own = [row for row in rows if row["arm"] == name]
        shown = [row for row in own if signed or row[key] > 0]
        panel.plot(
            [row["step"] for row in shown],
            [row[key] for row in shown],
            label=ARMS[name].label,
            linewidth=1.6,
            markersize=5.5,
            markevery=mark_every(i, len(names), settings),
            **_STYLES[name],
        )
        if shown:
            ends.append((name, float(shown[-1][key])))
    return ends


def label_arms(panel: Axes, ends: list[tuple[str, float]]) -> None:
    """Writes each arm's name at its line's end."""
    label_ends(panel, [(ARMS[name].label, _STYLES[name], value) for name, value in ends])


def mark_every(line: int, lines: int, settings: Settings) -> tuple[int, int]:
    """First marker and their distance, so that lines on top of each other show their own."""
    every = max(1, settings.steps // _MARKERS_PER_LINE)
    return line * every // lines, every


def dress(panel: Axes, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=11)
    panel.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def show_steps(panel: Axes, settings: Settings, empty: bool) -> None:
    """Steps to the right, a logarithmic axis upwards."""
    panel.set_xlabel("step")
    panel.set_xlim(0, settings.steps * 1.01)
    if empty:
        panel.set_ylim(0.1, 10)  # a logarithmic axis without data finds no limits of its own
    panel.set_yscale("log")


def set_ticks(axis: Axis, unit: str = "") -> None:
    """Plain numbers on a logarithmic axis, more of them the fewer decades there are."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    several = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if high / low < 15 else several
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}{unit}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _mark_target(panel: Axes, settings: Settings) -> None:
    bottom, top = panel.get_ylim()
    panel.set_ylim(max(bottom, settings.target / 20), max(top, settings.target * 2))
    panel.axhline(settings.target, color="black", linewidth=1.2, zorder=1)
    panel.annotate(
        f"target {settings.target:g}",
        (0, settings.target),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )


def _cap(panel: Axes, ends: list[tuple[str, float]], cap: float) -> list[tuple[str, float]]:
    """Cuts the panel off at ``cap`` and says in it where the lines that leave it end."""
    if panel.get_ylim()[1] <= cap:
        return ends
    panel.set_ylim(top=cap)
    beyond = [(name, value) for name, value in ends if value > cap]
    if beyond:
        text = "; ".join(f"{ARMS[name].label} ends at {number(value)}" for name, value in beyond)
        panel.annotate(text, (0.98, 0.94), xycoords="axes fraction", ha="right", fontsize=9)
    return [(name, value) for name, value in ends if value <= cap]


def label_ends(panel: Axes, ends: Iterable[tuple[str, dict[str, Any], float]]) -> None:
    """Writes a label, in its line's style, at each line's end; none touches another."""
    to_share = panel.transScale + panel.transLimits
    heights, colors = [], {}
    for label, style, value in ends:
        heights.append((float(to_share.transform((1, value))[1]), label))
        colors[label] = style["color"]
    for height, label in _spread(heights):
        panel.annotate(
            label,
            (1.01, height),
            xycoords="axes fraction",
            color=colors[label],
            fontsize=9,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def _spread(heights: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """The same labels from bottom to top, no two closer than the gap, none above the panel."""
    placed: list[tuple[float, str]] = []
    for height, name in sorted(heights):
        lowest = placed[-1][0] + _LABEL_GAP if placed else 0.0
        placed.append((max(height, lowest), name))
    ceiling = 1.0
    for i in range(len(placed) - 1, -1, -1):
        height, name = placed[i]
        placed[i] = (min(height, ceiling), name)
        ceiling = placed[i][0] - _LABEL_GAP
    return placed
