"""Few rows of options in which any two values meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    for row in rows:
        _remove(missing, row)
    added = []
    while missing:
        chosen = dict(next(iter(missing)))
        for option in range(len(sizes)):
            if option not in chosen:
                gains = [_gain(missing, (option, v), chosen) for v in range(sizes[option])]
                chosen[option] = gains.index(max(gains))
        added.append([chosen[option] for option in range(len(sizes))])
        _remove(missing, added[-1])
    return added


def _gain(missing: dict[Any, None], place: _Place, chosen: dict[int, int]) -> int:
    return sum(tuple(sorted((place, other))) in missing for other in chosen.items())


def _remove(missing: dict[Any, None], row: Sequence[int]) -> None:
    for pair in _pairs(row):
        missing.pop(pair, None)


def _pairs(row: Sequence[int]) -> Iterator[tuple[_Place, _Place]]:
    return combinations(enumerate(row), 2)
