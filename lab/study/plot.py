"""The study's picture: a panel for each rule, and one for the sensitivity to gains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lab.drawing import (
    dress,
    label_ends,
    new_figure,
    note,
    set_ticks,
    to_png,
    zero_line,
)
from lab.palette import BLUE, INK, LINE, SHADE, SILVER, TITLE, VERMILION
from lab.plots import STYLES
from lab.study.candidates import CANDIDATES, Gains
from lab.study.measure import WITHIN, Studied
from lab.study.plant import Plant
from lab.study.simulate import Course, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIRST, _TUNED = VERMILION, BLUE
_CEILING = 8.0  # targets, where a panel ends


def draw_study(studied: list[Studied], plant: Plant, course: Course) -> bytes:
    """As a PNG."""
    figure = new_figure(16, 8)
    axes = figure.subplots(2, 4).flatten()
    by_name = {candidate.name: candidate for candidate in CANDIDATES}
    ordered = sorted(studied, key=lambda rule: rule.tuned.miss)
    for panel, rule in zip(axes, ordered, strict=False):
        candidate = by_name[rule.name]

        def run(gains: Gains, candidate: Any = candidate) -> Tensor:
            return simulate(candidate, gains, plant, course)[0] / course.target

        _draw_rule(panel, rule, run(rule.first_gains), run(rule.tuned_gains), course)
    _draw_sensitivity(axes[len(ordered)], ordered)
    for panel in axes[len(ordered) + 1 :]:
        panel.set_visible(False)
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        ["first gains (published, or klfast's default)", "tuned gains"],
        loc="outside upper center",
        ncols=2,
        frameon=False,
    )
    return to_png(figure)


def _draw_rule(panel: Axes, rule: Studied, first: Tensor, tuned: Tensor, course: Course) -> None:
    for kl, color, style in ((first, _FIRST, "--"), (tuned, _TUNED, "-")):
        low, middle, high = torch.quantile(
            kl.clamp(1e-3, 1e3), torch.tensor([0.1, 0.5, 0.9], dtype=kl.dtype), dim=0
        )
        updates = range(course.updates)
        panel.fill_between(updates, low, high, color=color, alpha=0.15, linewidth=0)
        panel.plot(updates, middle, color=color, linestyle=style, linewidth=1.6, label=style)
    zero_line(panel, 1)
    panel.axhspan(1 - WITHIN, 1 + WITHIN, color=INK, alpha=SHADE, linewidth=0)
    panel.axvline(course.updates // 2, color=SILVER, linewidth=0.9, linestyle=":")
    dress(panel)
    panel.set_title(rule.label, loc="left", fontsize=TITLE)
    for height, text, color in (
        (0.95, f"{rule.source}: miss {rule.first.miss:.2f}", _FIRST),
        (0.88, f"tuned: miss {rule.tuned.miss:.2f}", _TUNED),
    ):
        place = {"xycoords": "axes fraction", "ha": "right", "va": "center"}
        note(panel, text, (0.97, height), color=color, **place)
    panel.set_ylim(1 / 8, _CEILING)
    panel.set_yscale("log")
    set_ticks(panel.yaxis)
    panel.set_xlim(0, course.updates)
    panel.set_xlabel("update")
    panel.set_ylabel("KL / target")


def _draw_sensitivity(panel: Axes, ordered: list[Studied]) -> None:
    ends = []
    for rule in ordered:
        style = STYLES[rule.name]
        line = {"color": style["color"], "marker": style["marker"]}
        panel.plot(rule.factors, rule.misses, markevery=4, **LINE, **line)
        ends.append((rule.label, style, rule.misses[-1]))
    dress(panel)
    panel.set_title("sensitivity to gains", loc="left", fontsize=TITLE)
    panel.set_ylabel("mean miss")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("tuned gains times")
    ticks = [2.0**i for i in range(-6, 7, 2)]
    panel.set_xticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    set_ticks(panel.yaxis)
    label_ends(panel, ends)
