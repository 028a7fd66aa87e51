"""The pictures of a run: a file of each, and its panels by themselves for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab import folder
from lab.accuracy import Bin
from lab.accuracy_plot import ESTIMATOR_STYLES, estimator_panels
from lab.arms import ARMS, off_policy, on_policy
from lab.drawing import Panel, png, svg, swatch
from lab.frontier_plot import frontier_panel
from lab.palette import Styles
from lab.plots import STYLES, curve_panels
from lab.sampler_plot import sampler_panels
from lab.sampler_summary import compared
from lab.settings import Settings
from lab.summary import Summary
from lab.train import Row


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
    arms = _chosen(STYLES, on_policy(settings.arms))
    frontier = [frontier_panel(rows, summaries, settings)]
    estimators = estimator_panels(rows, summaries, bins, settings)
    found = [
        _picture(folder.FRONTIER, frontier, 1, (9, 6.5), arms),
        _picture(folder.CURVES, curve_panels(rows, settings), 2, (13, 9), arms),
        _picture(folder.ESTIMATORS, estimators, 2, (13, 9), ESTIMATOR_STYLES, str),
    ]
    if off_policy(settings.arms):
        styles = _chosen(STYLES, compared(settings))
        found.append(_picture(folder.SAMPLER, sampler_panels(rows, settings), 3, (17, 9), styles))
    return {picture.file: picture for picture in found}


def _chosen(styles: Styles, names: Sequence[str]) -> Styles:
    return {name: styles[name] for name in names}


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
