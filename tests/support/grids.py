"""What ``make test`` runs of a grid of cases, and what it leaves to ``make test-all``.

A fault depends on one option or on how two meet (a reduction and a layout, an estimator and a
limit): cases in which every two meet find nearly all that the whole grid finds. A test says by its
marker which part that is::

    @pytest.mark.grid                  # any two values of two parameters meet in some case
    @pytest.mark.grid(each="backend")  # the same on every backend: what each computes by itself
    @pytest.mark.grid(meet=1)          # every value occurs: long cases, and Python that all share
"""

import heapq
import zlib
from itertools import combinations

import pytest


def covering(rows, meet=2):
    """Positions of few rows in which any ``meet`` values that meet in a row of ``rows`` meet.

    ``rows`` are tuples of one length, of a value per parameter. Each next row is the one in which
    the most values meet for the first time, the first among equals.
    """
    meetings = [set(combinations(enumerate(row), min(meet, len(row)))) for row in rows]
    missing = set().union(*meetings)
    queue = [(-len(of_row), position) for position, of_row in enumerate(meetings)]
    heapq.heapify(queue)
    chosen = set()
    while missing:
        _, position = heapq.heappop(queue)
        meetings[position] &= missing
        gain = (-len(meetings[position]), position)  # what the queue has is this or more
        if queue and queue[0] < gain:
            heapq.heappush(queue, gain)
        else:
            chosen.add(position)
            missing -= meetings[position]
    return chosen


def mark_exhaustive(items):
    """Marks the cases that ``make test`` leaves out of the tests marked ``grid``."""
    grids = {}
    for item in items:
        marker = item.get_closest_marker("grid")
        if marker and not item.get_closest_marker("exhaustive"):
            options = dict(marker.kwargs)
            each = item.callspec.params.get(options.pop("each", None))
            name = (item.path, item.originalname, each)
            grids.setdefault(name, (options, []))[1].append(item)
    for options, cases in grids.values():
        # Parameters may be tensors or functions: the same object is the same value.
        kept = covering(
            [tuple(map(id, case.callspec.params.values())) for case in cases], **options
        )
        for position, case in enumerate(cases):
            if position not in kept:
                case.add_marker(pytest.mark.exhaustive)


def is_in_part(nodeid, part):
    """True if a test belongs to a part such as "2/4". The cases of a function stay together."""
    number, parts = map(int, part.split("/"))
    return zlib.crc32(nodeid.partition("[")[0].encode()) % parts == number % parts
