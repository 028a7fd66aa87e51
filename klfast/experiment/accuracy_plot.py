"""The estimators' picture: beside the exact KL over the steps, their bias and their noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klfast.experiment.accuracy import Bin
from klfast.experiment.arms import ARMS, on_policy
from klfast.experiment.errors import SAMPLED
from klfast.experiment.plots import (
    Styles,
    add_legend,
    dress,
    label_ends,
    mark_every,
    new_figure,
    set_ticks,
    show_steps,
    to_png,
)
from klfast.experiment.settings import Settings
from klfast.experiment.summary import Summary
from klfast.experiment.train import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES: Styles = {
    "exact": {"color": "black", "linestyle": "-", "marker": ""},
    "k1": {"color": "#0072B2", "linestyle": "--", "marker": "o"},
    "k2": {"color": "#D55E00", "linestyle": ":", "marker": "s"},
    "k3": {"color": "#009E73", "linestyle": "-", "marker": "^"},
}
_LABELS = {"exact": "exact KL"} | {name: name for name in SAMPLED}


def draw_estimators(
    rows: list[Row], summaries: list[Summary], bins: list[Bin], settings: Settings
) -> bytes:
    """As a PNG: steps of the arms with the lowest and the highest KL; below, all tokens' errors."""
    figure = new_figure()
    arms = _extremes(summaries) or on_policy(settings.arms)[:1]
    panels = figure.subplot_mosaic([[arms[0], arms[-1]], ["/bias", "/std"]])
    for name in arms:
        _draw_steps(panels[name], [row for row in rows if row["arm"] == name], name, settings)
    _draw_bias(panels["/bias"], bins)
    _draw_std(panels["/std"], bins)
    add_legend(figure, panels[arms[0]])
    return to_png(figure)


def _extremes(summaries: list[Summary]) -> list[str]:
    """The arms that ended at the lowest and at the highest exact KL; one if there is one."""
    ordered = [s.name for s in sorted(summaries, key=lambda s: s.exact_kl)]
    return ordered[:1] + ordered[1:][-1:]


def _draw_steps(panel: Axes, rows: list[Row], name: str, settings: Settings) -> None:
    ends = []
    for i, estimator in enumerate(("exact", *SAMPLED)):
        key = f"kl_per_sequence_{estimator}"
        shown = [row for row in rows if row[key] > 0]
        panel.plot(
            [row["step"] for row in shown],
            [row[key] for row in shown],
            markevery=mark_every(i, len(_STYLES), settings),
            **(_line(estimator) | {"linewidth": 2.4 if estimator == "exact" else 1.3}),
        )
        if shown:
            ends.append((_LABELS[estimator], _STYLES[estimator], shown[-1][key]))
    dress(panel, f"KL in the arm “{ARMS[name].label}”, nats per sequence")
    show_steps(panel, settings, empty=not ends)
    set_ticks(panel.yaxis)
    label_ends(panel, ends)


def _draw_bias(panel: Axes, bins: list[Bin]) -> None:
    from matplotlib.ticker import PercentFormatter

    dress(panel, "Bias: mean error of a token, share of the exact KL, with 95 % bands")
    panel.axhline(0, color="black", linewidth=1.2, zorder=1)
    ends = []
    for name in SAMPLED:
        shown = [(b.exact, b.estimators[name]) for b in bins]
        exact = [kl for kl, _ in shown]
        panel.plot(exact, [a.bias for _, a in shown], **_line(name))
        panel.fill_between(
            exact,
            [a.bias - a.margin for _, a in shown],
            [a.bias + a.margin for _, a in shown],
            color=_STYLES[name]["color"],
            alpha=0.15,
            linewidth=0,
        )
        ends += [(name, _STYLES[name], a.bias) for _, a in shown[-1:]]
    _show_exact(panel, bins)
    panel.yaxis.set_major_formatter(PercentFormatter(1))
    label_ends(panel, ends)


def _draw_std(panel: Axes, bins: list[Bin]) -> None:
    dress(panel, "Noise: standard deviation of a token's error, share of the exact KL")
    ends = []
    for name in SAMPLED:
        shown = [(b.exact, 100 * b.estimators[name].std) for b in bins]
        panel.plot([kl for kl, _ in shown], [std for _, std in shown], **_line(name))
        ends += [(name, _STYLES[name], std) for _, std in shown[-1:]]
    _show_exact(panel, bins)
    if not bins:
        panel.set_ylim(1, 1000)
    panel.set_yscale("log")
    set_ticks(panel.yaxis, "%")
    label_ends(panel, ends)


def _line(name: str) -> dict[str, Any]:
    return {"label": _LABELS[name], "linewidth": 1.6, "markersize": 5.5, **_STYLES[name]}


def _show_exact(panel: Axes, bins: list[Bin]) -> None:
    panel.set_xlabel("exact KL of the token, nats")
    if not bins:
        panel.set_xlim(0.01, 10)
    panel.set_xscale("log")
    set_ticks(panel.xaxis)
