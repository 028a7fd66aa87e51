"""The estimators' panels: beside the exact KL over the steps, their bias and their noise."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lab.accuracy import Bin
from lab.arms import ARMS, on_policy
from lab.drawing import (
    Panel,
    dress,
    label_ends,
    set_shares,
    set_ticks,
    zero_line,
)
from lab.errors import SAMPLED
from lab.palette import BLUE, GREEN, INK, LINE, VERMILION, Styles
from lab.plots import mark_every, shade_window, show_steps
from lab.settings import Settings
from lab.summary import Summary
from lab.train import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ESTIMATOR_STYLES: Styles = {
    "exact KL": {"color": INK, "linestyle": "-", "marker": ""},
    "k1": {"color": BLUE, "linestyle": "--", "marker": "o"},
    "k2": {"color": VERMILION, "linestyle": ":", "marker": "s"},
    "k3": {"color": GREEN, "linestyle": "-", "marker": "^"},
}


def estimator_panels(
    rows: list[Row], summaries: list[Summary], bins: list[Bin], settings: Settings
) -> list[Panel]:
    """Steps of the arms with the lowest and the highest KL; then all tokens' errors."""
    arms = _extremes(summaries) or on_policy(settings.arms)[:1]
    steps = [
        Panel(
            f"KL in the arm “{ARMS[name].label}”, nats per sequence",
            f"Exact KL, k1, k2 and k3 over the steps of the arm {name}.",
            partial(_draw_steps, name=name, rows=rows, settings=settings),
        )
        for name in arms
    ]
    return [
        *steps,
        Panel(
            "Bias: mean error of a token, share of the exact KL, with 95 % bands",
            "Bias of k1, k2 and k3 over the exact KL of a token. The table has the same numbers.",
            partial(_draw_bias, bins=bins),
        ),
        Panel(
            "Noise: standard deviation of a token's error, share of the exact KL",
            "Noise of k1, k2 and k3 over the exact KL of a token. The table has the same numbers.",
            partial(_draw_std, bins=bins),
        ),
    ]


def _extremes(summaries: list[Summary]) -> list[str]:
    """The arms that ended at the lowest and at the highest exact KL; one if there is one."""
    ordered = [s.name for s in sorted(summaries, key=lambda s: s.exact_kl)]
    return ordered[:1] + ordered[1:][-1:]


def _draw_steps(panel: Axes, rows: list[Row], name: str, settings: Settings) -> None:
    own = [row for row in rows if row["arm"] == name]
    shade_window(panel, own, [name])
    ends = []
    for i, (label, style) in enumerate(ESTIMATOR_STYLES.items()):
        key = f"kl_per_sequence_{label.removesuffix(' KL')}"
        shown = [row for row in own if row[key] > 0]
        panel.plot(
            [row["step"] for row in shown],
            [row[key] for row in shown],
            markevery=mark_every(i, len(ESTIMATOR_STYLES), settings),
            **(_line(label) | {"linewidth": 1.3 if label in SAMPLED else 2.4}),
        )
        if shown:
            ends.append((label, style, shown[-1][key]))
    dress(panel)
    show_steps(panel, settings, empty=not ends)
    set_ticks(panel.yaxis)
    label_ends(panel, ends)


def _draw_bias(panel: Axes, bins: list[Bin]) -> None:
    dress(panel)
    zero_line(panel)
    ends = []
    for name in SAMPLED:
        shown = [(b.exact, b.estimators[name]) for b in bins]
        exact = [kl for kl, _ in shown]
        panel.plot(exact, [a.bias for _, a in shown], **_line(name))
        panel.fill_between(
            exact,
            [a.bias - a.margin for _, a in shown],
            [a.bias + a.margin for _, a in shown],
            color=ESTIMATOR_STYLES[name]["color"],
            alpha=0.15,
            linewidth=0,
        )
        ends += [(name, ESTIMATOR_STYLES[name], a.bias) for _, a in shown[-1:]]
    _show_exact(panel, bins)
    set_shares(panel.yaxis)
    label_ends(panel, ends)


def _draw_std(panel: Axes, bins: list[Bin]) -> None:
    dress(panel)
    ends = []
    for name in SAMPLED:
        shown = [(b.exact, 100 * b.estimators[name].std) for b in bins]
        panel.plot([kl for kl, _ in shown], [std for _, std in shown], **_line(name))
        ends += [(name, ESTIMATOR_STYLES[name], std) for _, std in shown[-1:]]
    _show_exact(panel, bins)
    if not bins:
        panel.set_ylim(1, 1000)
    panel.set_yscale("log")
    set_ticks(panel.yaxis, "%")
    label_ends(panel, ends)


def _line(name: str) -> dict[str, Any]:
    return {"label": name, **LINE, **ESTIMATOR_STYLES[name]}


def _show_exact(panel: Axes, bins: list[Bin]) -> None:
    panel.set_xlabel("exact KL of the token, nats")
    if not bins:
        panel.set_xlim(0.01, 10)
    panel.set_xscale("log")
    set_ticks(panel.xaxis)
