"""The curves of the arms on the policy: panels that read in colour, in grey and for a colour-blind
eye.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lab.arms import on_policy
from lab.drawing import (
    Panel,
    dress,
    label_ends,
    note,
    set_ticks,
    zero_line,
)
from lab.means import last_third, mean_of, number, rows_by_arm, window_of
from lab.palette import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LINE,
    ORANGE,
    PURPLE,
    SHADE,
    SKY,
    SMALL,
    VERMILION,
    Styles,
)
from lab.settings import Settings
from lab.train import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES: Styles = {
    "none": {"color": GREY, "linestyle": ":", "marker": "x"},
    "fixed-low": {"color": ORANGE, "linestyle": "--", "marker": "v"},
    "fixed-high": {"color": SKY, "linestyle": "--", "marker": "^"},
    "adaptive": {"color": BLUE, "linestyle": "-", "marker": "o"},
    "exponential": {"color": VERMILION, "linestyle": "-", "marker": "s"},
    "nupi": {"color": GREEN, "linestyle": "-", "marker": "D"},
    "pid": {"color": PURPLE, "linestyle": "-", "marker": "P"},
    "dual": {"color": INK, "linestyle": "-", "marker": "*"},
    "doubling": {"color": ORANGE, "linestyle": "-.", "marker": "<"},
    "control-vae": {"color": SKY, "linestyle": "-.", "marker": ">"},
    "stale": {"color": VERMILION, "linestyle": "-", "marker": "X"},
    "corrected": {"color": GREEN, "linestyle": "-", "marker": "d"},
}
MEAN: dict[str, Any] = {"linestyle": "-", "linewidth": 4.5, "alpha": 0.55, "solid_capstyle": "butt"}
"""A mean, as long as the steps that it is over."""

_MARKERS_PER_LINE = 8
_PERPLEXITY_CAP = 5  # times the first step's; beyond, arms that keep their fluency look all alike
_KL, _PERPLEXITY = "kl_per_sequence_k3", "held_out_perplexity"


def curve_panels(rows: list[Row], settings: Settings) -> list[Panel]:
    """Reward, KL, coefficient and perplexity over the steps."""
    zero = " (no penalty: 0)" if "none" in settings.arms else ""
    titles = {
        "reward": f"Reward: share of the letter “{settings.letter}”",
        _KL: "KL to the reference (k3, nats per sequence)",
        "coefficient": f"Coefficient of the KL penalty{zero}",
        _PERPLEXITY: "Perplexity of held-out text (per token)",
    }
    return [
        Panel(
            title,
            f"{title}, over the steps, a line for each arm. The summary has the same means.",
            partial(_draw_curve, key=key, rows=rows, settings=settings),
        )
        for key, title in titles.items()
    ]


def _draw_curve(panel: Axes, key: str, rows: list[Row], settings: Settings) -> None:
    names = on_policy(settings.arms)
    shade_window(panel, rows, names)
    ends = draw_lines(panel, key, rows, names, settings)
    draw_means(panel, key, rows, names)
    dress(panel)
    show_steps(panel, settings, empty=not ends)
    if key == _KL:
        _mark_target(panel, settings)
    if key == _PERPLEXITY and rows:
        ends = _cap(panel, ends, _PERPLEXITY_CAP * rows[0][key])
    set_ticks(panel.yaxis)
    label_arms(panel, ends)


def shade_window(panel: Axes, rows: list[Row], names: list[str]) -> None:
    """The steps that the means of the tables are over; of all arms, if some are not finished."""
    windows = [window_of(own) for own in rows_by_arm(rows, names).values() if own]
    if windows:
        first, last = min(w[0] for w in windows), max(w[1] for w in windows)
        panel.axvspan(first - 0.5, last + 0.5, color=INK, alpha=SHADE, linewidth=0)


def draw_means(panel: Axes, key: str, rows: list[Row], names: list[str]) -> None:
    """Each arm's mean over its window, the one that the tables have."""
    for name, own in rows_by_arm(rows, names).items():
        if own and (mean := mean_of(last_third(own), key)) > 0:
            first, last = window_of(own)
            panel.plot([first - 0.5, last + 0.5], [mean] * 2, color=STYLES[name]["color"], **MEAN)


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
    for i, (name, own) in enumerate(rows_by_arm(rows, names).items()):
        shown = [row for row in own if signed or row[key] > 0]
        panel.plot(
            [row["step"] for row in shown],
            [row[key] for row in shown],
            label=name,
            markevery=mark_every(i, len(names), settings),
            **LINE,
            **STYLES[name],
        )
        if shown:
            ends.append((name, float(shown[-1][key])))
    return ends


def label_arms(panel: Axes, ends: list[tuple[str, float]]) -> None:
    """Writes each arm's name at its line's end."""
    label_ends(panel, [(name, STYLES[name], value) for name, value in ends])


def mark_every(line: int, lines: int, settings: Settings) -> tuple[int, int]:
    """First marker and their distance, so that lines on top of each other show their own."""
    every = max(1, settings.steps // _MARKERS_PER_LINE)
    return line * every // lines, every


def show_steps(panel: Axes, settings: Settings, empty: bool) -> None:
    """Steps to the right, a logarithmic axis upwards."""
    step_axis(panel, settings)
    if empty:
        panel.set_ylim(0.1, 10)  # a logarithmic axis without data finds no limits of its own
    panel.set_yscale("log")


def step_axis(panel: Axes, settings: Settings) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.set_xlim(0, settings.steps * 1.01)


def _mark_target(panel: Axes, settings: Settings) -> None:
    bottom, top = panel.get_ylim()
    panel.set_ylim(max(bottom, settings.target / 20), max(top, settings.target * 2))
    zero_line(panel, settings.target)
    text = f"target {settings.target:g}"
    note(panel, text, (0, settings.target), xytext=(4, 4), textcoords="offset points")


def _cap(panel: Axes, ends: list[tuple[str, float]], cap: float) -> list[tuple[str, float]]:
    """Cuts the panel off at ``cap`` and says in it where the lines that leave it end."""
    if panel.get_ylim()[1] <= cap:
        return ends
    panel.set_ylim(top=cap)
    beyond = [(name, value) for name, value in ends if value > cap]
    if beyond:
        text = "; ".join(f"{name} ends at {number(value)}" for name, value in beyond)
        panel.annotate(text, (0.98, 0.94), xycoords="axes fraction", ha="right", fontsize=SMALL)
    return [(name, value) for name, value in ends if value <= cap]
