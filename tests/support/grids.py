"""Chooses the cases of a grid that ``make test`` runs. ``make test-all`` runs the others too.

A fault depends on one option or on a pair, such as a reduction and a layout. Cases with every pair
find nearly all faults that the whole grid finds. A test chooses the cases by its marker::

    @pytest.mark.grid                  # every pair of values of two parameters
    @pytest.mark.grid(each="backend")  # every pair on every backend, for code of the backend
    @pytest.mark.grid(meet=1)          # every value once, for slow cases and shared Python code
"""

import heapq
import zlib
from itertools import combinations

import pytest


def covering(rows, meet=2):
    """Positions of few rows that contain every combination of ``meet`` values in ``rows``.

    ``rows`` are tuples of one length, with a value per parameter. The next row is always the first
    row with the most new combinations.
    """
    meetings = [set(combinations(enumerate(row), min(meet, len(row)))) for row in rows]
    missing = set().union(*meetings)
    queue = [(-len(of_row), position) for position, of_row in enumerate(meetings)]
    heapq.heapify(queue)
    chosen = set()
    while missing:
        _, position = heapq.heappop(queue)
        meetings[position] &= missing
        gain = (-len(meetings[position]), position)  # the queue has a lower bound
        if queue and queue[0] < gain:
            heapq.heappush(queue, gain)
        else:
            chosen.add(position)
            missing -= meetings[position]
    return chosen


def mark_exhaustive(items):
    """Mark the cases of ``grid`` tests that ``make test`` leaves out."""
    grids = {}
    for item in items:
        marker = item.get_closest_marker("grid")
        if marker and not item.get_closest_marker("exhaustive"):
            options = dict(marker.kwargs)
            each = item.callspec.params.get(options.pop("each", None))
            name = (item.path, item.originalname, each)
            grids.setdefault(name, (options, []))[1].append(item)
    for options, cases in grids.values():
        # Parameters may be tensors or functions, so values are compared by identity.
        kept = covering(
            [tuple(map(id, case.callspec.params.values())) for case in cases], **options
        )
        for position, case in enumerate(cases):
            if position not in kept:
                case.add_marker(pytest.mark.exhaustive)


def is_in_part(item, part):
    """True if a test belongs to a part such as "2/4". All tests of the CUDA build share a part."""
    number, parts = map(int, part.split("/"))
    name = item.nodeid.partition("::")[0] if "built" in item.fixturenames else item.nodeid
    return zlib.crc32(name.encode()) % parts == number % parts
