"""The pages have the tables that ``benchmarks.report`` makes of the results."""

import itertools
import json

import pytest

from benchmarks import report, tables
from benchmarks.outcome import RESULTS


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_pages_are_what_the_results_say():
    assert report.main(["--check"]) == 0


def test_the_summary_is_of_the_files():
    parts = [json.loads((RESULTS / f"{name}.json").read_text()) for name in tables.SUMMARY]
    found = [line for line in tables.summary(parts).splitlines() if line[:2] == "| "]
    lines = {cells[0]: cells[1:] for cells in map(cells_of, found[1:])}
    for name, data in zip(tables.SUMMARY, parts, strict=True):
        shapes = dict.fromkeys(tuple(row["shape"]) for row in data["rows"])
        for shape, op in itertools.product(shapes, tables.SUMMARY[name]):
            rows = [r for r in data["rows"] if (tuple(r["shape"]), r["op"]) == (shape, op)]
            expected = [
                row["median_ms"] if impl == "klfast" else row["ratio"]
                for dtype in ("fp32", "bf16")
                for impl in ("klfast", "eager", "torch.compile")
                for row in rows
                if (row["dtype"], row["impl"]) == (dtype, impl)
            ]
            k3 = "k3 " if name == "cpu" else ""
            shown = lines.pop(f"{k3}{[*shape]} {tables.OPS[op]}")
            assert [float(cell.rstrip("x")) for cell in shown] == pytest.approx(expected, rel=0.05)
    assert lines == {}
