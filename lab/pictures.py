"""The five pictures: reward against KL, curves, estimators and sampler of a run, and the study's.

Each panel reads in colour, in grey and for a colour-blind eye.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lab import folder
from lab.accuracy import SAMPLED, Bin
from lab.arms import ARMS, off_policy, on_policy
from lab.drawing import (
    Ends,
    Panel,
    dress,
    label_ends,
    new_figure,
    note,
    png,
    set_shares,
    set_ticks,
    svg,
    swatch,
    to_png,
    zero_line,
)
from lab.folder import Row
from lab.palette import (
    BLUE,
    ESTIMATORS,
    INK,
    LINE,
    SHADE,
    SILVER,
    SMALL,
    STYLES,
    TITLE,
    VERMILION,
    Styles,
)
from lab.settings import Settings
from lab.summary import HELD_WITHIN, Summary, compared, last_third, mean_of, rows_by_arm, window_of
from lab.words import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lab.study.measure import Studied
    from lab.study.simulate import Course

MEAN: dict[str, Any] = {"linestyle": "-", "linewidth": 4.5, "alpha": 0.55, "solid_capstyle": "butt"}
"""A mean, as long as the steps that it is over."""

_MARKERS_PER_LINE = 8
_PERPLEXITY_CAP = 5  # times the first step's; beyond, arms that keep their fluency look all alike
_KL, _EXACT = "kl_per_sequence_k3", "kl_per_sequence_exact"
_PERPLEXITY = "held_out_perplexity"


@dataclass(frozen=True)
class Figure:
    """A panel in a page: ``svg`` is an element of HTML."""

    title: str
    svg: str


@dataclass(frozen=True)
class Picture:
    """A file and its name; its panels by themselves, and (element, text) for each line."""

    file: str
    png: bytes
    figures: list[Figure]
    legend: list[tuple[str, str]]


def draw_pictures(
    rows: list[Row], summaries: list[Summary], bins: list[Bin], settings: Settings
) -> dict[str, Picture]:
    """File name -> picture. That of the sampler is there only in a run that has one."""
    arms = {name: STYLES[name] for name in on_policy(settings.arms)}
    frontier = [frontier_panel(rows, summaries, settings)]
    estimators = estimator_panels(rows, summaries, bins, settings)
    found = [
        _picture(folder.FRONTIER, frontier, 1, (9, 6.5), arms),
        _picture(folder.CURVES, curve_panels(rows, settings), 2, (13, 9), arms),
        _picture(folder.ESTIMATORS, estimators, 2, (13, 9), ESTIMATORS, str),
    ]
    if off_policy(settings.arms):
        styles = {name: STYLES[name] for name in compared(settings)}
        found.append(_picture(folder.SAMPLER, sampler_panels(rows, settings), 3, (17, 9), styles))
    return {picture.file: picture for picture in found}


def _picture(
    file: str,
    panels: list[Panel],
    columns: int,
    size: tuple[float, float],
    styles: Styles,
    label: Callable[[str], str] = lambda name: ARMS[name].label,
) -> Picture:
    return Picture(
        file,
        png(panels, columns, size, label),
        [Figure(panel.title, svg(panel, file)) for panel in panels],
        [(swatch(style, file), label(name)) for name, style in styles.items()],
    )


# Reward against KL


def frontier_panel(rows: list[Row], summaries: list[Summary], settings: Settings) -> Panel:
    """The KL that each arm paid for its reward, on its way and at its end."""
    return Panel(
        "Reward against KL",
        "Reward over the KL to the reference, for each arm: a path of running means, and where it "
        "ended, with the spread from step to step. The summary has the same means.",
        partial(_draw_frontier, rows=rows, summaries=summaries, settings=settings),
    )


def path(rows: list[Row]) -> list[tuple[float, float]]:
    """(KL, reward): means over as many steps as the last one's, which is the tables'."""
    window = max(1, len(rows) // 3)
    pieces = [rows[max(0, end - window) : end] for end in range(1, len(rows) + 1)]
    points = [(mean_of(piece, _KL), mean_of(piece, "reward")) for piece in pieces]
    return [(kl, reward) for kl, reward in points if kl > 0]


def _draw_frontier(
    panel: Axes, rows: list[Row], summaries: list[Summary], settings: Settings
) -> None:
    by_arm = rows_by_arm(rows, on_policy(settings.arms))
    ends: Ends = []
    for s in summaries:
        style, way = STYLES[s.name], path(by_arm[s.name])
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
        ends.append((s.name, style, s.reward))
    dress(panel)
    panel.set(xlabel="KL to the reference (k3, nats per sequence)", ylabel="reward", xscale="log")
    target = settings.target
    low, high = panel.get_xlim() if ends else (1.0, 10.0)
    panel.set_xlim(min(low, target / 2), max(high, target * 2))
    set_ticks(panel.xaxis)
    band = (target * (1 - HELD_WITHIN), target * (1 + HELD_WITHIN))
    panel.axvspan(*band, color=INK, alpha=SHADE, linewidth=0)
    panel.axvline(target, color=INK, linewidth=1.2, zorder=1)
    place = {"xycoords": panel.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
    note(panel, f"target {target:g}", (target, 1), xytext=(4, -4), **place)
    set_shares(panel.yaxis)
    kls = {s.name: s.kl for s in summaries}
    label_ends(panel, ends, [(kls[name], reward) for name, _, reward in ends])


# Curves over the steps


def curve_panels(rows: list[Row], settings: Settings) -> list[Panel]:
    """Reward, KL, coefficient and perplexity over the steps."""
    zero = " (no penalty: 0)" if "none" in settings.arms else ""
    titles = {
        "reward": f"Reward: share of the letter “{settings.letter}”",
        _KL: "KL to the reference (k3, nats per sequence)",
        "coefficient": f"Coefficient of the KL penalty{zero}",
        _PERPLEXITY: "Perplexity of held-out text (per token)",
    }
    by_arm = rows_by_arm(rows, on_policy(settings.arms))
    return [
        Panel(
            title,
            f"{title}, over the steps, a line for each arm. The summary has the same means.",
            partial(_draw_curve, key=key, by_arm=by_arm, settings=settings),
        )
        for key, title in titles.items()
    ]


def _draw_curve(
    panel: Axes, key: str, by_arm: dict[str, list[Row]], settings: Settings, means: bool = True
) -> None:
    """With each arm's mean over its window, the one that the tables have."""
    if means:
        _shade_window(panel, by_arm.values())
    ends = _draw_lines(panel, {name: (own, key) for name, own in by_arm.items()}, settings)
    for name, own in by_arm.items() if means else ():
        if own and (mean := mean_of(last_third(own), key)) > 0:
            first, last = window_of(own)
            panel.plot([first - 0.5, last + 0.5], [mean] * 2, color=STYLES[name]["color"], **MEAN)
    _show_steps(panel, settings, empty=not ends)
    if key == _KL:
        _mark_target(panel, settings)
    first_rows = next((own for own in by_arm.values() if own), None)
    if key == _PERPLEXITY and first_rows:
        ends = _cap(panel, ends, _PERPLEXITY_CAP * first_rows[0][key])
    set_ticks(panel.yaxis)
    label_ends(panel, ends)


def _shade_window(panel: Axes, arms: Iterable[list[Row]]) -> None:
    """The steps that the means of the tables are over; of all arms, if some are not finished."""
    windows = [window_of(own) for own in arms if own]
    if windows:
        first, last = min(w[0] for w in windows), max(w[1] for w in windows)
        panel.axvspan(first - 0.5, last + 0.5, color=INK, alpha=SHADE, linewidth=0)


def _draw_lines(
    panel: Axes,
    lines: Mapping[str, tuple[list[Row], str]],
    settings: Settings,
    styles: Styles = STYLES,
    signed: bool = False,
) -> Ends:
    """A line for each (rows, key) over the steps; returns where they end.

    Values that a logarithmic axis cannot show are left out, unless they are ``signed``. Markers are
    apart, so that lines on top of each other show their own.
    """
    ends: Ends = []
    every = max(1, settings.steps // _MARKERS_PER_LINE)
    for i, (name, (rows, key)) in enumerate(lines.items()):
        shown = [row for row in rows if signed or row[key] > 0]
        panel.plot(
            [row["step"] for row in shown],
            [row[key] for row in shown],
            label=name,
            markevery=(i * every // len(lines), every),
            **(LINE | styles[name]),
        )
        ends += [(name, styles[name], float(row[key])) for row in shown[-1:]]
    return ends


def _show_steps(panel: Axes, settings: Settings, empty: bool = False, scale: str = "log") -> None:
    """Steps to the right, by default a logarithmic axis upwards."""
    from matplotlib.ticker import MaxNLocator

    dress(panel)
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.set_xlim(0, settings.steps * 1.01)
    if empty:
        panel.set_ylim(0.1, 10)  # a logarithmic axis without data finds no limits of its own
    panel.set_yscale(scale)


def _mark_target(panel: Axes, settings: Settings) -> None:
    bottom, top = panel.get_ylim()
    panel.set_ylim(max(bottom, settings.target / 20), max(top, settings.target * 2))
    zero_line(panel, settings.target)
    text = f"target {settings.target:g}"
    note(panel, text, (0, settings.target), xytext=(4, 4), textcoords="offset points")


def _cap(panel: Axes, ends: Ends, cap: float) -> Ends:
    """Cuts the panel off at ``cap`` and says in it where the lines that leave it end."""
    if panel.get_ylim()[1] <= cap:
        return ends
    panel.set_ylim(top=cap)
    beyond = [f"{name} ends at {number(value)}" for name, _, value in ends if value > cap]
    if beyond:
        place: dict[str, Any] = {"xycoords": "axes fraction", "ha": "right", "fontsize": SMALL}
        panel.annotate("; ".join(beyond), (0.98, 0.94), **place)
    return [end for end in ends if end[2] <= cap]


# The estimators


def estimator_panels(
    rows: list[Row], summaries: list[Summary], bins: list[Bin], settings: Settings
) -> list[Panel]:
    """Steps of the arms with the lowest and the highest KL; then all tokens' errors."""
    ordered = [s.name for s in sorted(summaries, key=lambda s: s.exact_kl)]
    arms = ordered[:1] + ordered[1:][-1:] or on_policy(settings.arms)[:1]
    steps = [
        Panel(
            f"KL in the arm “{ARMS[name].label}”, nats per sequence",
            f"Exact KL, k1, k2 and k3 over the steps of the arm {name}.",
            partial(_draw_steps, rows=rows_by_arm(rows, [name])[name], settings=settings),
        )
        for name in arms
    ]
    same = "of k1, k2 and k3 over the exact KL of a token. The table has the same numbers."
    return [
        *steps,
        Panel(
            "Bias: mean error of a token, share of the exact KL, with 95 % bands",
            f"Bias {same}",
            partial(draw_bias, bins=bins),
        ),
        Panel(
            "Noise: standard deviation of a token's error, share of the exact KL",
            f"Noise {same}",
            partial(draw_noise, bins=bins),
        ),
    ]


def _draw_steps(panel: Axes, rows: list[Row], settings: Settings) -> None:
    _shade_window(panel, [rows])
    lines = {name: (rows, f"kl_per_sequence_{name.removesuffix(' KL')}") for name in ESTIMATORS}
    ends = _draw_lines(panel, lines, settings, ESTIMATORS)
    _show_steps(panel, settings, empty=not ends)
    set_ticks(panel.yaxis)
    label_ends(panel, ends)


def draw_bias(panel: Axes, bins: list[Bin]) -> None:
    """Each estimator's, with its band."""
    zero_line(panel)
    for name in SAMPLED:
        shown = [(b.exact, b.estimators[name]) for b in bins]
        low, high = ([a.bias + sign * a.margin for _, a in shown] for sign in (-1, 1))
        band = {"color": ESTIMATORS[name]["color"], "alpha": 0.15, "linewidth": 0}
        panel.fill_between([kl for kl, _ in shown], low, high, **band)
    _draw_errors(panel, bins, lambda b, name: b.estimators[name].bias)
    set_shares(panel.yaxis)


def draw_noise(panel: Axes, bins: list[Bin]) -> None:
    """Each estimator's, in per cent."""
    if not bins:
        panel.set_ylim(1, 1000)
    panel.set_yscale("log")
    _draw_errors(panel, bins, lambda b, name: 100 * b.estimators[name].std)
    set_ticks(panel.yaxis, "%")


def _draw_errors(panel: Axes, bins: list[Bin], of: Callable[[Bin, str], float]) -> None:
    """A line for each estimator over the exact KL."""
    exact = [b.exact for b in bins]
    for name in SAMPLED:
        line = LINE | ESTIMATORS[name]
        panel.plot(exact, [of(b, name) for b in bins], label=name, **line)
    dress(panel)
    panel.set_xlabel("exact KL of the token, nats")
    if not bins:
        panel.set_xlim(0.01, 10)
    panel.set_xscale("log")
    set_ticks(panel.xaxis)
    label_ends(
        panel, [(name, ESTIMATORS[name], of(b, name)) for b in bins[-1:] for name in SAMPLED]
    )


# The sampler


def sampler_panels(rows: list[Row], settings: Settings) -> list[Panel]:
    """How far the sampler is off the policy, and what the correction changes: first the arms and
    their partner on the policy, then sampler and policy.
    """
    flat = [{**row, **row["rollout"]} for row in rows if "rollout" in row]
    for row in flat:
        row["bounded"] = row["outside"] + row["rejected_tokens"]
    arms = rows_by_arm(rows, compared(settings))
    own = rows_by_arm(flat, off_policy(settings.arms))
    curve = partial(_draw_curve, settings=settings)
    shares = partial(_draw_shares, by_arm=own, settings=settings)
    of_arms = "over the steps, a line for each arm off the policy and for their partner on it"
    of_sampler = "over the steps, a line for each arm off the policy"
    chosen = (
        (
            f"Reward: share of the letter “{settings.letter}”",
            of_arms,
            partial(curve, key="reward", by_arm=arms),
        ),
        (
            "Exact KL to the reference (nats per sequence)",
            of_arms,
            partial(curve, key=_EXACT, by_arm=arms),
        ),
        (
            "k1 with the arm's weights, off the exact KL (steps so far)",
            of_sampler,
            partial(_draw_running_error, by_arm=own, settings=settings),
        ),
        (
            "KL(rollout || policy) (k3, nats per token)",
            of_sampler,
            partial(curve, key="k3", by_arm=own, means=False),
        ),
        ("Effective sample size", of_sampler, partial(shares, key="ess")),
        (
            f"Tokens that “{settings.correction}” bounds or rejects",
            of_sampler,
            partial(shares, key="bounded"),
        ),
    )
    return [
        Panel(title, f"{title}, {what}. The table has its means.", draw)
        for title, what, draw in chosen
    ]


def _draw_running_error(panel: Axes, by_arm: dict[str, list[Row]], settings: Settings) -> None:
    """The running mean of k1 against that of the exact KL, both from the sampler's tokens."""
    running: dict[str, list[Row]] = {}
    for name, rows in by_arm.items():
        key = "weighted_k1" if ARMS[name].is_corrected else "kl_per_sequence_k1"
        estimate = exact = 0.0
        running[name] = []
        for row in rows:
            estimate, exact = estimate + row[key], exact + row[_EXACT]
            if exact > 0:
                running[name].append({**row, "error": estimate / exact - 1})
    zero_line(panel)
    _draw_shares(panel, running, settings, "error", signed=True)


def _draw_shares(
    panel: Axes, by_arm: dict[str, list[Row]], settings: Settings, key: str, signed: bool = False
) -> None:
    """Shares upwards, from 0 on unless they are ``signed``."""
    lines = {name: (own, key) for name, own in by_arm.items()}
    ends = _draw_lines(panel, lines, settings, signed=signed)
    _show_steps(panel, settings, scale="linear")
    if not signed:
        panel.set_ylim(bottom=0)
    set_shares(panel.yaxis)
    label_ends(panel, ends)


# The study

_FIRST: dict[str, Any] = {"color": VERMILION, "linestyle": "--"}
_TUNED: dict[str, Any] = {"color": BLUE, "linestyle": "-"}
_CEILING = 8.0  # targets, where a panel ends


def draw_study(
    studied: Sequence[Studied],
    runs: Mapping[str, tuple[Tensor, Tensor]],
    course: Course,
    within: float,
) -> bytes:
    """A panel for each rule, and one for the sensitivity to gains, as a PNG.

    ``runs``: by rule, the KL [seeds, updates] under its first and its tuned gains, in targets.
    ``within``: of the target counts as on it.
    """
    figure = new_figure(16, 8)
    axes = figure.subplots(2, 4).flatten()
    ordered = sorted(studied, key=lambda rule: rule.tuned.miss)
    for panel, rule in zip(axes, ordered, strict=False):
        panel.axhspan(1 - within, 1 + within, color=INK, alpha=SHADE, linewidth=0)
        _draw_rule(panel, rule, *runs[rule.name], course)
    _draw_sensitivity(axes[len(ordered)], ordered)
    for panel in axes[len(ordered) + 1 :]:
        panel.set_visible(False)
    texts = ["first gains (published, or klfast's default)", "tuned gains"]
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside upper center", ncols=2, frameon=False)
    return to_png(figure)


def _draw_rule(panel: Axes, rule: Studied, first: Tensor, tuned: Tensor, course: Course) -> None:
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
        note(panel, text, (0.97, height), color=style["color"], **place)
    zero_line(panel, 1)
    panel.axvline(course.updates // 2, color=SILVER, linewidth=0.9, linestyle=":")
    dress(panel)
    panel.set_title(rule.label, loc="left", fontsize=TITLE)
    panel.set_ylim(1 / 8, _CEILING)
    panel.set_yscale("log")
    set_ticks(panel.yaxis)
    panel.set(xlim=(0, course.updates), xlabel="update", ylabel="KL / target")


def _draw_sensitivity(panel: Axes, ordered: Sequence[Studied]) -> None:
    for rule in ordered:
        line = LINE | {key: STYLES[rule.name][key] for key in ("color", "marker")}
        panel.plot(rule.factors, rule.misses, markevery=4, **line)
    dress(panel)
    panel.set_title("sensitivity to gains", loc="left", fontsize=TITLE)
    panel.set(ylabel="mean miss", yscale="log", xlabel="tuned gains times")
    panel.set_xscale("log", base=2)
    ticks = [2.0**i for i in range(-6, 7, 2)]
    panel.set_xticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    set_ticks(panel.yaxis)
    label_ends(panel, [(rule.label, STYLES[rule.name], rule.misses[-1]) for rule in ordered])
