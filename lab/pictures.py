"""The five pictures: reward against KL, curves, estimators and sampler of a run, and the study's.

Each panel is readable in colour, in grey and with colour blindness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lab import drawing, run, summary
from lab.settings import ARMS, Settings, off_policy, on_policy
from lab.train import SAMPLED, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lab.study.simulate import Course, Studied

MEAN: dict[str, Any] = {"linestyle": "-", "linewidth": 4.5, "alpha": 0.55, "solid_capstyle": "butt"}
"""The style of a mean. Its line spans the steps that it averages."""

_MARKERS_PER_LINE = 8
_PERPLEXITY_CAP = 5  # times the first step's; above it, fluent arms would look alike
_KL, _EXACT = "kl_per_sequence_k3", "kl_per_sequence_exact"
_PERPLEXITY = "held_out_perplexity"

ByArm = Mapping[str, Sequence[Row]]
Summaries = list[summary.Summary]


def draw_pictures(
    rows: list[Row], summaries: Summaries, bins: list[summary.Bin], settings: Settings
) -> dict[str, bytes]:
    """File name -> PNG. Only a run with a sampler has the sampler's picture."""
    figures = {
        run.FRONTIER: draw_frontier(rows, summaries, settings),
        run.CURVES: draw_curves(rows, settings),
        run.ESTIMATORS: draw_estimators(rows, summaries, bins, settings),
    }
    if off_policy(settings.arms):
        figures[run.SAMPLER] = draw_sampler(rows, settings)
    for name, figure in figures.items():
        own = name != run.ESTIMATORS
        drawing.add_legend(figure, figure.axes[0], (lambda arm: ARMS[arm].label) if own else str)
    return {name: drawing.png_of(figure) for name, figure in figures.items()}


def draw_frontier(rows: list[Row], summaries: Summaries, settings: Settings) -> Figure:
    """The KL that each arm paid for its reward, on its way and at its end."""
    figure = drawing.new_figure(6.5)
    panel = figure.subplots()
    by_arm = summary.rows_by_arm(rows, on_policy(settings.arms))
    for s in summaries:
        style, way = drawing.STYLES[s.name], path(by_arm[s.name])
        if not way:
            continue  # a KL of 0 has no place on a logarithmic axis
        line = {key: style[key] for key in ("color", "linestyle")}
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
    drawing.dress(panel, "Reward against KL")
    panel.set(xlabel="KL to the reference (k3, nats per sequence)", ylabel="reward", xscale="log")
    target = settings.target
    low, high = panel.get_xlim() if panel.lines else (1.0, 10.0)
    panel.set_xlim(min(low, target / 2), max(high, target * 2))
    drawing.set_ticks(panel.xaxis)
    within = summary.HELD_WITHIN
    panel.axvspan(target * (1 - within), target * (1 + within), **drawing.BAND)
    panel.axvline(target, color=drawing.INK, linewidth=1.2, zorder=1)
    place = {"xycoords": panel.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
    drawing.note(panel, f"target {target:g}", (target, 1), xytext=(4, -4), **place)
    drawing.set_shares(panel.yaxis)
    return figure


def path(rows: list[Row]) -> list[tuple[float, float]]:
    """(KL, reward): means over as many steps as the last mean, which is in the tables."""
    window = max(1, len(rows) // 3)
    pieces = [rows[max(0, end - window) : end] for end in range(1, len(rows) + 1)]
    points = [(summary.mean_of(piece, _KL), summary.mean_of(piece, "reward")) for piece in pieces]
    return [(kl, reward) for kl, reward in points if kl > 0]


def draw_curves(rows: list[Row], settings: Settings) -> Figure:
    """Reward, KL, coefficient and perplexity over the steps."""
    zero = " (no penalty: 0)" if "none" in settings.arms else ""
    titles = {
        "reward": f"Reward: share of the letter “{settings.letter}”",
        _KL: "KL to the reference (k3, nats per sequence)",
        "coefficient": f"Coefficient{zero}",
        _PERPLEXITY: "Perplexity of held-out text (per token)",
    }
    figure = drawing.new_figure(7.5)
    by_arm = summary.rows_by_arm(rows, on_policy(settings.arms))
    for panel, (key, title) in zip(figure.subplots(2, 2).flatten(), titles.items(), strict=True):
        _curve(panel, title, key, by_arm, settings)
    return figure


def _curve(
    panel: Axes, title: str, key: str, by_arm: ByArm, settings: Settings, means: bool = True
) -> None:
    """A line for each arm on a logarithmic axis, with its mean over the window of the tables."""
    _lines(panel, {name: (own, key) for name, own in by_arm.items()}, settings)
    for name, own in by_arm.items() if means else ():
        if own and (mean := summary.mean_of(summary.last_third(own), key)) > 0:
            first, last = _window([own])
            panel.plot([first, last], [mean] * 2, color=drawing.STYLES[name]["color"], **MEAN)
    _steps(panel, title, settings, by_arm.values() if means else ())
    if key == _KL:
        bottom, top = panel.get_ylim()
        panel.set_ylim(max(bottom, settings.target / 20), max(top, settings.target * 2))
        drawing.zero_line(panel, settings.target)
        place = {"xytext": (4, 4), "textcoords": "offset points"}
        drawing.note(panel, f"target {settings.target:g}", (0, settings.target), **place)
    first_rows = next((own for own in by_arm.values() if own), None)
    if key == _PERPLEXITY and first_rows:
        cap = _PERPLEXITY_CAP * first_rows[0][key]
        panel.set_ylim(top=min(cap, panel.get_ylim()[1]))
    drawing.set_ticks(panel.yaxis)


def _window(arms: Sequence[Sequence[Row]]) -> tuple[float, float]:
    """The first and last step that the tables' means cover, in any arm if some are unfinished."""
    windows = [summary.last_third(own) for own in arms]
    return (
        min(rows[0]["step"] for rows in windows) - 0.5,
        max(rows[-1]["step"] for rows in windows) + 0.5,
    )


def _lines(
    panel: Axes,
    lines: Mapping[str, tuple[Sequence[Row], str]],
    settings: Settings,
    styles: drawing.Styles = drawing.STYLES,
    signed: bool = False,
) -> None:
    """Draws a line for each (rows, key) over the steps.

    Values that a logarithmic axis cannot show are left out, unless they are ``signed``. Each line
    has its markers at other steps, so that lines on top of each other stay visible.
    """
    every = max(1, settings.steps // _MARKERS_PER_LINE)
    for i, (name, (rows, key)) in enumerate(lines.items()):
        shown = [row for row in rows if signed or row[key] > 0]
        panel.plot(
            [row["step"] for row in shown],
            [row[key] for row in shown],
            label=name,
            markevery=(i * every // len(lines), every),
            **(drawing.LINE | styles[name]),
        )


def _steps(
    panel: Axes,
    title: str,
    settings: Settings,
    means_of: Any = (),
    scale: str = "log",
) -> None:
    """Sets up the axes, with steps to the right, and shades the window of the means."""
    from matplotlib.ticker import MaxNLocator

    if arms := [own for own in means_of if own]:
        panel.axvspan(*_window(arms), **drawing.BAND)
    drawing.dress(panel, title)
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.set_xlim(0, settings.steps * 1.01)
    if scale == "log" and panel.dataLim.y0 > panel.dataLim.y1:  # without data
        panel.set_ylim(0.1, 10)  # a logarithmic axis without data finds no limits of its own
    panel.set_yscale(scale)


def draw_estimators(
    rows: list[Row], summaries: Summaries, bins: list[summary.Bin], settings: Settings
) -> Figure:
    """Draws the arms with the lowest and the highest KL, then the errors of all tokens."""
    ordered = [s.name for s in sorted(summaries, key=lambda s: s.exact_kl)]
    arms = ordered[:1] + ordered[1:][-1:] or on_policy(settings.arms)[:1]
    figure = drawing.new_figure(7.5)
    *of_arms, bias, noise, spare = [*figure.subplots(2, 2).flatten(), None][: len(arms) + 3]
    for name, panel in zip(arms, of_arms, strict=False):
        own = summary.rows_by_arm(rows, [name])[name]
        styles = drawing.ESTIMATORS
        lines = {each: (own, f"kl_per_sequence_{each.removesuffix(' KL')}") for each in styles}
        _lines(panel, lines, settings, styles)
        title = f"KL in the arm “{ARMS[name].label}”, nats per sequence"
        _steps(panel, title, settings, [own])
        drawing.set_ticks(panel.yaxis)
    draw_errors(bias, noise, bins)
    if spare is not None:
        spare.set_visible(False)
    return figure


def draw_errors(bias: Axes, noise: Axes, bins: list[summary.Bin]) -> None:
    """Draws each estimator's bias with its band, and its noise in per cent, over the exact KL."""
    drawing.zero_line(bias)
    exact = [b.exact for b in bins]
    for name in SAMPLED:
        style, found = drawing.LINE | drawing.ESTIMATORS[name], [b.estimators[name] for b in bins]
        low, high = ([a.bias + sign * a.margin for a in found] for sign in (-1, 1))
        bias.fill_between(exact, low, high, color=style["color"], alpha=0.15, linewidth=0)
        bias.plot(exact, [a.bias for a in found], label=name, **style)
        noise.plot(exact, [100 * a.std for a in found], label=name, **style)
    if not bins:
        noise.set_ylim(1, 1000)
    noise.set_yscale("log")
    for panel, title in (
        (bias, "Bias: mean error of a token, share of the exact KL, with 95 % bands"),
        (noise, "Noise: standard deviation of a token's error, share of the exact KL"),
    ):
        drawing.dress(panel, title)
        panel.set_xlabel("exact KL of the token, nats")
        if not bins:
            panel.set_xlim(0.01, 10)
        panel.set_xscale("log")
        drawing.set_ticks(panel.xaxis)
    drawing.set_shares(bias.yaxis)
    drawing.set_ticks(noise.yaxis, "%")


def draw_sampler(rows: list[Row], settings: Settings) -> Figure:
    """Draws how far the sampler is off the policy, and the effect of the correction.

    The first panels show the arms and their on-policy partner, the others sampler and policy.
    """
    flat = [{**row, **row["rollout"]} for row in rows if "rollout" in row]
    for row in flat:
        row["bounded"] = row["outside"] + row["rejected_tokens"]
    arms = summary.rows_by_arm(rows, summary.compared(settings))
    own = summary.rows_by_arm(flat, off_policy(settings.arms))
    figure = drawing.new_figure(10)
    reward, exact, error, drift, ess, bounded = figure.subplots(3, 2).flatten()
    _curve(reward, f"Reward: share of the letter “{settings.letter}”", "reward", arms, settings)
    _curve(exact, "Exact KL to the reference (nats per sequence)", _EXACT, arms, settings)
    title = "Error of k1 with the weights of the arm, mean of the steps so far"
    drawing.zero_line(error)
    _shares(error, title, "error", running_errors(own), settings, signed=True)
    _curve(drift, "KL(rollout || policy) (k3, nats per token)", "k3", own, settings, means=False)
    _shares(ess, "Effective sample size", "ess", own, settings)
    title = f"Tokens that “{settings.correction}” bounds or rejects"
    _shares(bounded, title, "bounded", own, settings)
    return figure


def running_errors(by_arm: ByArm) -> dict[str, list[Row]]:
    """The relative error of the running mean of k1. Both means are from the sampler's tokens."""
    running: dict[str, list[Row]] = {}
    for name, rows in by_arm.items():
        key = "weighted_k1" if ARMS[name].is_corrected else "kl_per_sequence_k1"
        estimate = exact = 0.0
        running[name] = []
        for row in rows:
            estimate, exact = estimate + row[key], exact + row[_EXACT]
            if exact > 0:
                running[name].append({**row, "error": estimate / exact - 1})
    return running


def _shares(
    panel: Axes, title: str, key: str, by_arm: ByArm, settings: Settings, signed: bool = False
) -> None:
    """Draws shares. The axis begins at 0 unless they are ``signed``."""
    lines = {name: (own, key) for name, own in by_arm.items()}
    _lines(panel, lines, settings, signed=signed)
    _steps(panel, title, settings, scale="linear")
    if not signed:
        panel.set_ylim(bottom=0)
    drawing.set_shares(panel.yaxis)


_FIRST: dict[str, Any] = {"color": drawing.VERMILION, "linestyle": "--"}
_TUNED: dict[str, Any] = {"color": drawing.BLUE, "linestyle": "-"}
_CEILING = 8.0  # targets, where a panel ends


def draw_study(
    studied: Sequence[Studied],
    runs: Mapping[str, tuple[Tensor, Tensor]],
    course: Course,
    within: float,
) -> bytes:
    """A panel for each controller, and one for the sensitivity to gains, as a PNG.

    ``runs`` has for each controller the KL [seeds, updates] under its first and its tuned gains,
    as multiples of the target. A KL within the share ``within`` of the target counts as on target.
    """
    figure = drawing.new_figure(11)
    axes = figure.subplots(4, 2).flatten()
    ordered = sorted(studied, key=lambda rule: rule.tuned.miss)
    for panel, rule in zip(axes, ordered, strict=False):
        panel.axhspan(1 - within, 1 + within, **drawing.BAND)
        _rule(panel, rule, *runs[rule.name], course)
    _sensitivity(axes[len(ordered)], ordered)
    for panel in axes[len(ordered) + 1 :]:
        panel.set_visible(False)
    texts = ["first gains (published, or klfast's default)", "tuned gains"]
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside upper center", ncols=2, frameon=False)
    rules = axes[len(ordered)].get_legend_handles_labels()
    figure.legend(*rules, loc="outside lower right", ncols=4, frameon=False)
    return drawing.png_of(figure)


def _rule(panel: Axes, rule: Studied, first: Tensor, tuned: Tensor, course: Course) -> None:
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=first.dtype)
    place = {"xycoords": "axes fraction", "ha": "right", "va": "center"}
    for kl, style, height, text in (
        (first, _FIRST, 0.95, f"{rule.source}: miss {rule.first.miss:.2f}"),
        (tuned, _TUNED, 0.88, f"tuned: miss {rule.tuned.miss:.2f}"),
    ):
        low, middle, high = torch.quantile(kl.clamp(1e-3, 1e3), shares, dim=0)
        updates = range(course.updates)
        panel.fill_between(updates, low, high, color=style["color"], alpha=0.15, linewidth=0)
        panel.plot(updates, middle, linewidth=1.6, label=text, **style)
        drawing.note(panel, text, (0.97, height), color=style["color"], **place)
    drawing.zero_line(panel, 1)
    panel.axvline(course.updates // 2, color=drawing.SILVER, linewidth=0.9, linestyle=":")
    drawing.dress(panel, rule.label)
    panel.set_ylim(1 / 8, _CEILING)
    panel.set_yscale("log")
    drawing.set_ticks(panel.yaxis)
    panel.set(xlim=(0, course.updates), xlabel="update", ylabel="KL / target")


def _sensitivity(panel: Axes, ordered: Sequence[Studied]) -> None:
    for rule in ordered:
        line = drawing.LINE | {key: drawing.STYLES[rule.name][key] for key in ("color", "marker")}
        panel.plot(rule.factors, rule.misses, markevery=4, label=rule.label, **line)
    drawing.dress(panel, "sensitivity to gains")
    panel.set(ylabel="mean miss", yscale="log", xlabel="tuned gains times")
    panel.set_xscale("log", base=2)
    ticks = [2.0**i for i in range(-6, 7, 2)]
    panel.set_xticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    drawing.set_ticks(panel.yaxis)
