"""Panels: what each shows, a file of several, and each by itself for a page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.palette import DPI, GRID, INK, PAPER, SMALL, TITLE, VARIABLES, text_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PANEL_SIZE = (4.2, 3.2)
"""Inches of a panel on a page: as wide as a phone, whose text then is of the usual size."""

Ends = list[tuple[str, dict[str, Any], float]]
"""Label, style and height of lines where they end."""

_LABEL_GAP = 0.055  # between the labels at the lines' ends, as a share of the panel's height
_SVG_COLOR = re.compile(r"(?<=: )#[0-9a-f]{6}\b")


@dataclass(frozen=True)
class Panel:
    """One figure.

    Attributes:
        title: what it shows, in a line.
        alt: the same for those who do not see it.
        draw: draws it, but for the title.
    """

    title: str
    alt: str
    draw: Callable[[Axes], None]


def png(
    panels: Sequence[Panel],
    columns: int,
    size: tuple[float, float],
    label: Callable[[str], str] = str,
) -> bytes:
    """All panels in one picture, with one legend for the lines of the first.

    ``label`` gives the legend's text for a line's label.
    """
    figure = new_figure(*size)
    rows = -(-len(panels) // columns)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, place in zip(panels, axes, strict=False):
        panel.draw(place)
        place.set_title(panel.title, loc="left", fontsize=TITLE)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    add_legend(figure, axes[0], label)
    return to_png(figure)


def svg(panel: Panel, salt: str = "") -> str:
    """A panel by itself, as an element of HTML whose colours are the page's variables.

    With another ``salt`` or title, its names within are others.
    """
    figure = new_figure(*PANEL_SIZE)
    panel.draw(figure.subplots())
    return _to_svg(figure, panel.alt, salt + panel.title)


def swatch(style: dict[str, Any], salt: str = "") -> str:
    """A short piece of a line, for a page's legend; ``salt`` as of :func:`svg`."""
    from matplotlib.lines import Line2D

    figure = new_figure(0.5, 0.16, layout=None)
    look = {"linewidth": 1.6, "markersize": 6} | style
    line = Line2D([0.02, 0.5, 0.98], [0.5] * 3, markevery=[1], **look)
    line.set_transform(figure.transFigure)
    figure.add_artist(line)
    return _to_svg(figure, "", salt + str(sorted(style.items())))


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout=layout)


def add_legend(figure: Figure, panel: Axes, label: Callable[[str], str] = str) -> None:
    """One legend for the figure, of the lines in ``panel``."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(
        handles,
        [label(text) for text in labels],
        loc="outside upper center",
        ncols=max(1, min(7, len(labels))),
        frameon=False,
        handlelength=4,
    )


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _to_svg(figure: Figure, alt: str, salt: str) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return inline(buffer.getvalue(), alt)


def inline(document: str, alt: str) -> str:
    """An SVG document as an element of HTML.

    It has the page's width and font, and no names that another picture's may equal; colours are
    variables.
    """
    body = document[document.index("<svg") :].strip()
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    used = set(re.findall(r"[(\"]#([^)\"]+)[)\"]", body))
    body = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", body)
    body = _SVG_COLOR.sub(lambda m: f"var({VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], body)
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None  # matplotlib writes one
    hidden = f'role="img" aria-label="{html.escape(alt)}"' if alt else 'aria-hidden="true"'
    return f"<svg {box[0]} {hidden}>{body[body.index('>') + 1 :]}"


def dress(panel: Axes) -> None:
    panel.grid(True, which="major", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def zero_line(panel: Axes, height: float = 0.0) -> None:
    """The line that others are held against."""
    panel.axhline(height, color=INK, linewidth=1.2, zorder=1)


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


def set_shares(axis: Axis) -> None:
    """Shares as per cents."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1))


def label_ends(panel: Axes, ends: Ends, leads: Sequence[tuple[float, float]] | None = None) -> None:
    """Writes a label, in its line's style, at each line's end; none touches another.

    ``leads``: a point for each, from which a thin line leads to its label.
    """
    to_share = panel.transScale + panel.transLimits
    heights = [
        (float(to_share.transform((1, value))[1]), i) for i, (_, _, value) in enumerate(ends)
    ]
    for height, i in spread(heights):
        label, style, _ = ends[i]
        lead: dict[str, Any] = {"xy": (1.01, height), "xycoords": "axes fraction"}
        if leads is not None:
            arrow = {"arrowstyle": "-", "color": style["color"], "alpha": 0.4, "linewidth": 0.8}
            lead = {"xy": leads[i], "arrowprops": arrow}
        panel.annotate(
            label,
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=text_color(style["color"]),
            fontsize=SMALL,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            **lead,
        )


def spread(heights: Iterable[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """The same labels from bottom to top, no two closer than the gap, none above the panel."""
    placed: list[tuple[float, Any]] = []
    for height, name in sorted(heights):
        lowest = placed[-1][0] + _LABEL_GAP if placed else 0.0
        placed.append((max(height, lowest), name))
    ceiling = 1.0
    for i in range(len(placed) - 1, -1, -1):
        height, name = placed[i]
        placed[i] = (min(height, ceiling), name)
        ceiling = placed[i][0] - _LABEL_GAP
    return placed


def note(panel: Axes, text: str, place: tuple[float, float], **how: Any) -> None:
    """Words within a panel, on paper of their own."""
    box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    panel.annotate(text, place, fontsize=SMALL, bbox=box, **how)
