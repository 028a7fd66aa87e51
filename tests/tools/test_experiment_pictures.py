"""The pictures: what each panel shows, and that it can be read on light and on dark pages."""

import itertools
import statistics

import pytest
from made_up_run import FAR, NEAR, bins, rows
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from lab import drawing, run
from lab.drawing import STYLES, spread
from lab.pictures import (
    draw_bias,
    draw_curves,
    draw_frontier,
    draw_noise,
    draw_pictures,
    path,
)
from lab.settings import ARMS as ALL_ARMS
from lab.settings import Settings
from lab.summary import summarise
from lab.train import SAMPLED

pytestmark = pytest.mark.exhaustive

ARMS = ("none", "fixed-low", "adaptive")
SETTINGS = Settings(steps=6, arms=ARMS, target=6.0)
RECORDS = [
    *rows("none", [0, 20, 40, 60, 80, 100], coefficient=0.0, reward=[0.1, 0.2, 0.3, 0.5, 0.7, 0.8]),
    *rows("fixed-low", [0, 2, 3, 4, 4, 5], reward=[0.1, 0.1, 0.2, 0.2, 0.2, 0.3]),
    *rows("adaptive", [0, 5, 7, 6, 5, 7], reward=[0.1, 0.2, 0.2, 0.3, 0.3, 0.4]),
]


def contrast(one, other):
    """Of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(color):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_words_stand_out_from_the_paper():
    """4.5, as the guidelines ask; lines have markers too."""
    for style in STYLES.values():
        words = drawing.WORDS.get(style["color"], style["color"])
        assert contrast(words, drawing.PAPER) >= 4.5
        assert contrast(style["color"], drawing.PAPER) >= 2.0


def test_the_curves_mark_the_means_of_the_tables():
    summaries = summarise(RECORDS, SETTINGS)
    for panel, quantity in zip(
        draw_curves(RECORDS, SETTINGS).axes,
        ("reward", "kl", "coefficient", "perplexity"),
        strict=True,
    ):
        lines = panel.get_lines()
        for s in summaries:
            mean = getattr(s, quantity)
            color = STYLES[s.name]["color"]
            bars = [
                line
                for line in lines
                if list(line.get_xdata()) == [4.5, 6.5] and line.get_color() == color
            ]
            assert [list(bar.get_ydata()) for bar in bars] == ([[mean] * 2] if mean else [])


def test_the_frontier_ends_at_the_means_of_the_tables():
    summaries = summarise(RECORDS, SETTINGS)
    (axes,) = draw_frontier(RECORDS, summaries, SETTINGS).axes
    ways = {line.get_color(): line for line in axes.get_lines() if len(line.get_xdata()) > 2}
    for s, container in zip(summaries, axes.containers, strict=True):
        marker, _, spreads = container
        assert (marker.get_xdata()[0], marker.get_ydata()[0]) == (s.kl, s.reward)
        way = ways[STYLES[s.name]["color"]]
        assert (way.get_xdata()[-1], way.get_ydata()[-1]) == pytest.approx((s.kl, s.reward))
        (below, above) = spreads[1].get_segments()[0][:, 1]
        assert above - below == pytest.approx(2 * s.reward_spread)
    low, high = axes.get_xlim()
    assert low < 6 < 90 < high


def test_a_path_is_the_means_over_as_many_steps_as_the_last_ones():
    own = rows("adaptive", [0, 5, 7, 6, 5, 8], reward=[0.1, 0.2, 0.2, 0.3, 0.3, 0.4])
    kls = [0, 5, 7, 6, 5, 8]
    assert [kl for kl, _ in path(own)] == [statistics.mean(kls[i - 1 : i + 1]) for i in range(1, 6)]
    assert path(rows("adaptive", [0, 0])) == []


def test_the_picture_shows_bias_and_noise_of_every_bin():
    bias, noise = Figure().subplots(1, 2)
    draw_bias(bias, bins(NEAR, FAR))
    draw_noise(noise, bins(NEAR, FAR))
    shown = {line.get_label(): line for line in noise.get_lines()}
    for i, name in enumerate(SAMPLED, start=1):
        assert list(shown[name].get_xdata()) == [0.03, 3.0]
        assert list(shown[name].get_ydata()) == [100 * NEAR[i][1], 100 * FAR[i][1]]
    shown = {line.get_label(): line for line in bias.get_lines()}
    for i, (name, band) in enumerate(zip(SAMPLED, bias.collections, strict=True), start=1):
        assert list(shown[name].get_ydata()) == [NEAR[i][0], FAR[i][0]]
        heights = band.get_paths()[0].vertices[:, 1]
        for value in (NEAR[i][0], FAR[i][0]):
            for edge in (value - 0.02, value + 0.02):
                assert min(abs(heights - edge)) < 1e-9


@pytest.mark.parametrize(
    ("records", "arms"),
    [
        ([], ("adaptive",)),
        ([], tuple(ALL_ARMS)),
        (rows("adaptive", [0]), ("adaptive", "none")),
        (rows("adaptive", [0, 5, 6]), ("adaptive", "none")),
        (rows("none", [0, 1e9], perplexity=1e8), ("none", "stale", "corrected")),
        (RECORDS[:8], ARMS),
    ],
    ids=["nothing", "nothing-of-all", "no-kl", "one-arm", "far", "unfinished"],
)
def test_pictures_of_any_part_of_a_run_are_drawn(records, arms):
    settings = Settings(steps=6, arms=arms)
    pictures = draw_pictures(records, summarise(records, settings), bins(), settings)
    expected = {run.FRONTIER, run.CURVES, run.ESTIMATORS}
    if "stale" in arms:
        expected.add(run.SAMPLER)
    assert set(pictures) == expected
    for picture in pictures.values():
        assert picture.startswith(b"\x89PNG")


def test_labels_are_moved_apart_and_stay_in_the_panel():
    placed = spread([(0.99, "a"), (1.0, "b"), (0.5, "c"), (0.98, "d")])
    heights = [height for height, _ in placed]
    assert [name for _, name in placed] == ["c", "d", "a", "b"]
    assert max(heights) <= 1
    assert all(b - a > 0.05 for a, b in itertools.pairwise(heights))


def test_arms_of_one_colour_differ_in_line_or_marker():
    looks = [(to_hex(s["color"]), s["linestyle"], s["marker"]) for s in STYLES.values()]
    assert len(set(looks)) == len(looks)
