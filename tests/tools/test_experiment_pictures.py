"""The pictures: what each panel shows, and that it can be read on light and on dark pages."""

import itertools
import re
import statistics

import pytest
from made_up_run import FAR, NEAR, bins, rows
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from lab import drawing, folder, palette
from lab.accuracy import SAMPLED
from lab.drawing import Panel, png, spread, svg
from lab.palette import STYLES
from lab.pictures import curve_panels, draw_bias, draw_noise, draw_pictures, frontier_panel, path
from lab.settings import ARM_NAMES, OFF_POLICY_ARMS, Settings
from lab.summary import summarise

pytestmark = pytest.mark.exhaustive

ARMS = ("none", "fixed-low", "adaptive")
SETTINGS = Settings(steps=6, arms=ARMS, target=6.0)
RECORDS = [
    *rows("none", [0, 20, 40, 60, 80, 100], coefficient=0.0, reward=[0.1, 0.2, 0.3, 0.5, 0.7, 0.8]),
    *rows("fixed-low", [0, 2, 3, 4, 4, 5], reward=[0.1, 0.1, 0.2, 0.2, 0.2, 0.3]),
    *rows("adaptive", [0, 5, 7, 6, 5, 7], reward=[0.1, 0.2, 0.2, 0.3, 0.3, 0.4]),
]


def drawn(panel):
    axes = Figure().subplots()
    panel.draw(axes)
    return axes


def contrast(one, other):
    """Of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(color):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", [0, 1], ids=["light", "dark"])
def test_words_and_lines_stand_out_from_the_page(page):
    """4.5 for words, as the guidelines ask; lines have markers too."""
    shown = {light.lower(): both[page] for both in palette.COLORS.values() for light in both[:1]}
    paper = shown[palette.PAPER]
    for style in STYLES.values():
        assert contrast(shown[palette.text_color(style["color"]).lower()], paper) >= 4.5
        assert contrast(shown[style["color"].lower()], paper) >= (2.0, 4.5)[page]
    assert contrast(shown[palette.GREY], paper) >= 4.5  # of notes


def test_every_colour_of_a_picture_is_the_pages():
    summaries = summarise(RECORDS, SETTINGS)
    pictures = draw_pictures(RECORDS, summaries, bins(NEAR, FAR), SETTINGS)
    for picture in pictures.values():
        elements = [figure.svg for figure in picture.figures]
        for element in elements + [swatch for swatch, _ in picture.legend]:
            assert not re.search(r": *(#[0-9a-fA-F]{3}|black|white|rgb)", element)
            used = re.findall(r"var\((--[\w-]+)\)", element)
            assert used
            assert set(used) <= set(palette.VARIABLES.values())


def test_the_style_sheet_has_every_variable_for_light_and_dark_pages():
    light, dark = palette.style_sheet().split("@media")
    assert "(prefers-color-scheme: dark)" in dark
    for variable in palette.VARIABLES.values():
        assert f"{variable}: " in light
        assert f"{variable}: " in dark


def test_two_pictures_in_a_page_share_no_name():
    """A marker's definition is found by its name in the whole page."""
    panels = curve_panels(RECORDS, SETTINGS)
    names = [set(re.findall(r'id="([^"]*)"', svg(panel))) for panel in panels]
    assert all(names)
    assert sum(map(len, names)) == len(set().union(*names))
    assert svg(panels[0]) == svg(panels[0])


def test_a_picture_says_what_it_is_to_those_who_do_not_see_it():
    panel = Panel('"a" & b', 'of "a" & b', lambda axes: axes.plot([1, 2], [1, 2]))
    assert 'role="img" aria-label="of &quot;a&quot; &amp; b"' in svg(panel)


def test_words_of_a_picture_are_text_of_a_legible_size():
    """On a phone of 390 px a picture is 358 wide."""
    for panel in (*curve_panels(RECORDS, SETTINGS), frontier_panel(RECORDS, [], SETTINGS)):
        element = svg(panel)
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', element)[1])
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", element)]
        assert len(sizes) > 5
        assert min(sizes) * 358 / width >= 10.5


def test_the_curves_mark_the_means_of_the_tables():
    summaries = summarise(RECORDS, SETTINGS)
    for panel, quantity in zip(
        curve_panels(RECORDS, SETTINGS),
        ("reward", "kl", "coefficient", "perplexity"),
        strict=True,
    ):
        lines = drawn(panel).get_lines()
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
    axes = drawn(frontier_panel(RECORDS, summaries, SETTINGS))
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
        ([], ARM_NAMES),
        (rows("adaptive", [0]), ("adaptive", "none")),
        (rows("adaptive", [0, 5, 6]), ("adaptive", "none")),
        (rows("none", [0, 1e9], perplexity=1e8), ("none", *OFF_POLICY_ARMS)),
        (RECORDS[:8], ARMS),
    ],
    ids=["nothing", "nothing-of-all", "no-kl", "one-arm", "far", "unfinished"],
)
def test_pictures_of_any_part_of_a_run_are_drawn(records, arms):
    settings = Settings(steps=6, arms=arms)
    pictures = draw_pictures(records, summarise(records, settings), bins(), settings)
    expected = {folder.FRONTIER, folder.CURVES, folder.ESTIMATORS}
    if set(arms) & set(OFF_POLICY_ARMS):
        expected.add(folder.SAMPLER)
    assert set(pictures) == expected
    for picture in pictures.values():
        assert picture.png.startswith(b"\x89PNG")
        assert all("</svg>" in figure.svg for figure in picture.figures)


def test_a_file_has_all_panels_with_their_titles(monkeypatch):
    figures = []
    monkeypatch.setattr(drawing, "to_png", lambda figure: figures.append(figure) or b"")
    panels = curve_panels(RECORDS, SETTINGS)
    png(panels, 3, (9, 6))
    (figure,) = figures
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [panel.title for panel in panels]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(ARMS)


def test_labels_are_moved_apart_and_stay_in_the_panel():
    placed = spread([(0.99, "a"), (1.0, "b"), (0.5, "c"), (0.98, "d")])
    heights = [height for height, _ in placed]
    assert [name for _, name in placed] == ["c", "d", "a", "b"]
    assert max(heights) <= 1
    assert all(b - a > 0.05 for a, b in itertools.pairwise(heights))


def test_arms_of_one_colour_differ_in_line_or_marker():
    looks = [(to_hex(s["color"]), s["linestyle"], s["marker"]) for s in STYLES.values()]
    assert len(set(looks)) == len(looks)
