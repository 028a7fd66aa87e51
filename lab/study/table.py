"""The study in words: a table in Markdown, and sentences that follow from it."""

from __future__ import annotations

from typing import Any

Rule = dict[str, Any]
"""A rule of the study's JSON, see :class:`lab.study.measure.Studied`."""

_HEAD = (
    "| rule | gains | settles in | overshoot | error | recovers in | lost | mean miss | octaves |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table(study: dict[str, Any]) -> str:
    """Two rows for each rule, best tuned ones first."""
    lines = [_HEAD]
    for rule in ranked(study):
        first = f"{rule['source']}: {gains_text(rule['first_gains'])}"
        tuned = f"tuned: {gains_text(rule['tuned_gains'])}"
        lines.append(_row(rule["label"], first, rule["first"], ""))
        lines.append(_row("", tuned, rule["tuned"], f"{rule['octaves']:.1f}"))
    return "\n".join(lines) + "\n"


def plant_table(study: dict[str, Any]) -> str:
    """The plant's numbers."""
    numbers = study["plant"]
    return (
        f"| {' | '.join(numbers)} |\n|{'---|' * len(numbers)}\n"
        f"| {' | '.join(f'{value:.3g}' for value in numbers.values())} |\n"
    )


def ranked(study: dict[str, Any]) -> list[Rule]:
    """The rules, from the least mean miss at tuned gains to the largest."""
    return sorted(study["rules"], key=lambda rule: float(rule["tuned"]["miss"]))


def reading(study: dict[str, Any]) -> list[str]:
    """The sentences that follow from the numbers."""
    rules = ranked(study)
    best, second = rules[0], rules[1]
    broad = max(rules, key=lambda rule: float(rule["octaves"]))
    quiet = min(rules, key=lambda rule: float(rule["tuned"]["overshoot"]))
    as_they_come = sorted(rules, key=lambda rule: float(rule["first"]["miss"]))
    failing = [rule for rule in rules if rule["first"]["lost"] >= 0.25]
    sentences = [
        f"Tuned, {best['label']} misses its target least ({best['tuned']['miss']:.3f} in the "
        f"logarithm), then {second['label']} ({second['tuned']['miss']:.3f}).",
        f"At {as_they_come[0]['source']} gains {as_they_come[0]['label']} does best "
        f"({as_they_come[0]['first']['miss']:.3f}), then {as_they_come[1]['label']} "
        f"({as_they_come[1]['first']['miss']:.3f}).",
        f"{_upper(broad['label'])} forgives wrong gains most: {broad['octaves']:.1f} octaves of "
        "them keep the miss below 1.5 times its least.",
        f"{_upper(quiet['label'])} overshoots least when tuned, by "
        f"{quiet['tuned']['overshoot']:.0%}.",
    ]
    if failing:
        names = ", ".join(
            f"{rule['label']} ({rule['first']['lost']:.0%} of the seeds)" for rule in failing
        )
        sentences.append(
            f"At their first gains these often end off target by a factor of 2 or more: {names}."
        )
    return sentences


def _row(label: str, gains: str, held: dict[str, Any], octaves: str) -> str:
    cells = (
        label,
        gains,
        _updates(held["settling"]),
        f"{held['overshoot']:.0%}",
        f"{held['error']:.0%}",
        _updates(held["recovery"]),
        f"{held['lost']:.0%}",
        f"{held['miss']:.3f}",
        octaves,
    )
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _updates(count: float | None) -> str:
    return "never" if count is None else f"{count:.0f}"


def gains_text(gains: dict[str, float]) -> str:
    return ", ".join(f"{name}={value:.3g}" for name, value in gains.items())


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
