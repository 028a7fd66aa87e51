"""Colours, lines and axes of all pictures.

Series have Okabe and Ito's colours, which colour-blind readers can distinguish. Each series also
has its own line and marker.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, PAPER, GRID, FAINT = "#000000", "#ffffff", "#e4e4e4", "#bbbbbb"
GREY, SILVER = "#555555", "#999999"
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
VERMILION, ORANGE, PURPLE, YELLOW = "#D55E00", "#E69F00", "#CC79A7", "#F0E442"

Styles = dict[str, dict[str, Any]]

STYLES: Styles = {
    "none": {"color": GREY, "linestyle": ":", "marker": "x"},
    "fixed-low": {"color": ORANGE, "linestyle": "--", "marker": "v"},
    "fixed-high": {"color": SKY, "linestyle": "--", "marker": "^"},
    "adaptive": {"color": BLUE, "linestyle": "-", "marker": "o"},
    "exponential": {"color": VERMILION, "linestyle": "-", "marker": "s"},
    "nupi": {"color": GREEN, "linestyle": "-", "marker": "D"},
    "pid-lagrangian": {"color": PURPLE, "linestyle": "-", "marker": "P"},
    "dual": {"color": INK, "linestyle": "-", "marker": "*"},
    "doubling": {"color": ORANGE, "linestyle": "-.", "marker": "<"},
    "control-vae": {"color": SKY, "linestyle": "-.", "marker": ">"},
    "stale": {"color": VERMILION, "linestyle": "-", "marker": "X"},
    "corrected": {"color": GREEN, "linestyle": "-", "marker": "d"},
}
"""The arms' lines."""

ESTIMATORS: Styles = {
    "exact KL": {"color": INK, "linestyle": "-", "marker": "", "linewidth": 2.4},
    "k1": {"color": BLUE, "linestyle": "--", "marker": "o"},
    "k2": {"color": VERMILION, "linestyle": ":", "marker": "s"},
    "k3": {"color": GREEN, "linestyle": "-", "marker": "^"},
}

LINE: dict[str, Any] = {"linewidth": 1.6, "markersize": 5.5}
BAND: dict[str, Any] = {"color": INK, "alpha": 0.08, "linewidth": 0}
SMALL, TITLE = 10, 11
WIDTH = 8.4
"""Inches of every picture, so that its text has at least 10 pt where a page is 840 px wide."""


def new_figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=120, layout="constrained")


def png_of(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def add_legend(figure: Figure, panel: Axes, label: Callable[[str], str] = str) -> None:
    """Adds one legend for the lines in ``panel`` to the figure. ``label`` gives a line's text."""
    handles, labels = panel.get_legend_handles_labels()
    texts, columns = [label(text) for text in labels], max(1, min(4, len(labels)))
    place: dict[str, Any] = {"loc": "outside upper center", "frameon": False, "handlelength": 4}
    figure.legend(handles, texts, ncols=columns, **place)


def dress(panel: Axes, title: str = "", characters: int = 44) -> None:
    """Draws a grid, and a title with at most so many characters in a line."""
    panel.grid(True, which="major", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    if title:
        panel.set_title(textwrap.fill(title, characters), loc="left", fontsize=TITLE)


def zero_line(panel: Axes, height: float = 0.0) -> None:
    """Draws the line that others are compared with."""
    panel.axhline(height, color=INK, linewidth=1.2, zorder=1)


def set_ticks(axis: Axis, unit: str = "") -> None:
    """Sets plain numbers on a logarithmic axis. With fewer decades there are more of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    several = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if high / low < 15 else several
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}{unit}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def set_shares(axis: Axis) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1))


def note(panel: Axes, text: str, place: tuple[float, float], **how: Any) -> None:
    """Writes text into a panel, on a background of its own."""
    box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    panel.annotate(text, place, fontsize=SMALL, bbox=box, **how)
