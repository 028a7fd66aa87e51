"""Few rows of options in which any two values meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
_Place = tuple[int, int]
"""An option and one of its values, as positions."""


def covering(options: Mapping[str, Sequence[Any]]) -> tuple[list[Row], int]:
    """The rows, and how many of the first hold every value at least once.

    A fault depends on one option or on how two meet: such rows find nearly all that every
    combination would. Where an option's values have met all others, rows have its first.
    """
    sizes = [len(values) for values in options.values()]
    longest = max(sizes)
    rows = [[i % size for size in sizes] for i in range(longest)]
    rows += _pairs_missing_from(rows, sizes)
    names = list(options.items())
    return (
        [{name: values[at] for (name, values), at in zip(names, row, strict=True)} for row in rows],
        longest,
    )


def _pairs_missing_from(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[list[int]]:
    places = [(option, value) for option, size in enumerate(sizes) for value in range(size)]
    missing = {(a, b): None for a, b in combinations(places, 2) if a[0] != b[0]}  # in order
    unmet = {a: {b for b in places if a[0] != b[0]} for a in places}
    for row in rows:
        _remove(missing, unmet, row)
    added = []
    while missing:
        chosen = set(next(iter(missing)))
        for option in sorted(set(range(len(sizes))) - {option for option, _ in chosen}):
            gains = [len(unmet[option, value] & chosen) for value in range(sizes[option])]
            chosen.add((option, gains.index(max(gains))))
        added.append([value for _, value in sorted(chosen)])
        _remove(missing, unmet, added[-1])
    return added


def _remove(
    missing: dict[tuple[_Place, _Place], None], unmet: dict[_Place, set[_Place]], row: Sequence[int]
) -> None:
    for a, b in combinations(enumerate(row), 2):
        missing.pop((a, b), None)
        unmet[a].discard(b)
        unmet[b].discard(a)
