"""The colours and sizes of all pictures, for light and for dark pages.

Series have Okabe and Ito's colours, which the colour-blind can tell apart; each has a line and a
marker of its own as well.
"""

from __future__ import annotations

from typing import Any

INK, PAPER, GRID, FAINT = "#000000", "#ffffff", "#e4e4e4", "#bbbbbb"
GREY, SILVER = "#555555", "#999999"
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
VERMILION, ORANGE, PURPLE, YELLOW = "#D55E00", "#E69F00", "#CC79A7", "#F0E442"

_WORDS = {
    ORANGE: ("orange-words", "#8F6200"),
    SKY: ("sky-words", "#1F6F9E"),
    PURPLE: ("purple-words", "#A8477C"),
    GREEN: ("green-words", "#007A59"),
    VERMILION: ("vermilion-words", "#B84F00"),
}
"""Colour -> that of words in it, whose contrast on white paper is at least 4.5, and its name."""

_ON_DARK = {
    INK: ("ink", "#e8e8e8"),
    PAPER: ("paper", "#16181c"),
    GRID: ("grid", "#33373e"),
    FAINT: ("faint", "#5a5f68"),
    GREY: ("grey", "#b4b4b4"),
    SILVER: ("silver", "#8a8a8a"),
    BLUE: ("blue", "#4d9fe0"),
    SKY: ("sky", "#8fd3ff"),
    GREEN: ("green", "#2fc79b"),
    VERMILION: ("vermilion", "#ff8a3d"),
    ORANGE: ("orange", "#f2b52e"),
    PURPLE: ("purple", "#e59cc6"),
    YELLOW: ("yellow", "#f0e442"),
}
"""Colour -> its name, and the same on dark paper."""

COLORS = {name: (color, dark) for color, (name, dark) in _ON_DARK.items()} | {
    name: (words, _ON_DARK[color][1]) for color, (name, words) in _WORDS.items()
}
"""Name -> the colour on light and on dark paper."""

VARIABLES = {light.lower(): f"--{name}" for name, (light, _) in COLORS.items()}
"""Colour -> the variable of a page's style sheet that holds it."""

Styles = dict[str, dict[str, Any]]

STYLES: Styles = {
    "none": {"color": GREY, "linestyle": ":", "marker": "x"},
    "fixed-low": {"color": ORANGE, "linestyle": "--", "marker": "v"},
    "fixed-high": {"color": SKY, "linestyle": "--", "marker": "^"},
    "adaptive": {"color": BLUE, "linestyle": "-", "marker": "o"},
    "exponential": {"color": VERMILION, "linestyle": "-", "marker": "s"},
    "nupi": {"color": GREEN, "linestyle": "-", "marker": "D"},
    "pid-lagrangian": {"color": PURPLE, "linestyle": "-", "marker": "P"},
    "dual": {"color": INK, "linestyle": "-", "marker": "*"},
    "doubling": {"color": ORANGE, "linestyle": "-.", "marker": "<"},
    "control-vae": {"color": SKY, "linestyle": "-.", "marker": ">"},
    "stale": {"color": VERMILION, "linestyle": "-", "marker": "X"},
    "corrected": {"color": GREEN, "linestyle": "-", "marker": "d"},
}
"""The arms' lines."""

ESTIMATORS: Styles = {
    "exact KL": {"color": INK, "linestyle": "-", "marker": "", "linewidth": 2.4},
    "k1": {"color": BLUE, "linestyle": "--", "marker": "o"},
    "k2": {"color": VERMILION, "linestyle": ":", "marker": "s"},
    "k3": {"color": GREEN, "linestyle": "-", "marker": "^"},
}

LINE: dict[str, Any] = {"linewidth": 1.6, "markersize": 5.5}
SHADE = 0.08
"""How much ink there is in a band."""

SMALL, TITLE = 9, 11
DPI = 110


def text_color(color: str) -> str:
    """The colour in which words of a series are written."""
    return _WORDS[color][1] if color in _WORDS else color


def style_sheet() -> str:
    """The variables, for light and for dark pages."""
    light, dark = (
        "".join(f" --{name}: {both[i]};" for name, both in COLORS.items()) for i in range(2)
    )
    return (
        f":root {{{light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{{dark} }} }}"
    )
