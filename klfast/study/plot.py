"""The study's picture: a panel for each rule, and one for the sensitivity to gains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klfast.experiment.plots import dress, label_ends, set_ticks, to_png
from klfast.study.candidates import CANDIDATES, Gains
from klfast.study.measure import WITHIN, Studied
from klfast.study.plant import Plant
from klfast.study.simulate import Course, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIRST, _TUNED = "#D55E00", "#0072B2"
_LINES: dict[str, dict[str, Any]] = {
    "adaptive": {"color": "#0072B2", "marker": "o"},
    "exponential": {"color": "#D55E00", "marker": "s"},
    "nupi": {"color": "#009E73", "marker": "D"},
    "pid": {"color": "#CC79A7", "marker": "P"},
    "dual": {"color": "#000000", "marker": "*"},
    "doubling": {"color": "#E69F00", "marker": "<"},
    "control-vae": {"color": "#56B4E9", "marker": ">"},
}
_CEILING = 8.0  # targets, where a panel ends


def draw_study(studied: list[Studied], plant: Plant, course: Course) -> bytes:
    """As a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 8), dpi=110, layout="constrained")
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
    panel.axhline(1, color="black", linewidth=1.0, zorder=1)
    panel.axhspan(1 - WITHIN, 1 + WITHIN, color="black", alpha=0.06, linewidth=0)
    panel.axvline(course.updates // 2, color="#888888", linewidth=0.9, linestyle=":")
    dress(panel, rule.label)
    for height, text, color in (
        (0.95, f"{rule.source}: miss {rule.first.miss:.2f}", _FIRST),
        (0.88, f"tuned: miss {rule.tuned.miss:.2f}", _TUNED),
    ):
        panel.annotate(
            text,
            (0.97, height),
            xycoords="axes fraction",
            ha="right",
            va="center",
            fontsize=9,
            color=color,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        )
    panel.set_ylim(1 / 8, _CEILING)
    panel.set_yscale("log")
    set_ticks(panel.yaxis)
    panel.set_xlim(0, course.updates)
    panel.set_xlabel("update")
    panel.set_ylabel("KL / target")


def _draw_sensitivity(panel: Axes, ordered: list[Studied]) -> None:
    ends = []
    for rule in ordered:
        style = _LINES[rule.name]
        panel.plot(rule.factors, rule.misses, linewidth=1.4, markersize=5, markevery=4, **style)
        ends.append((rule.label, style, rule.misses[-1]))
    dress(panel, "sensitivity to gains")
    panel.set_ylabel("mean miss")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("tuned gains times")
    ticks = [2.0**i for i in range(-6, 7, 2)]
    panel.set_xticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    set_ticks(panel.yaxis)
    label_ends(panel, ends)
