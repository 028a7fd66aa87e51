"""The pages have the tables that ``benchmarks.report`` makes of the results."""

import itertools
import json

import pytest

from benchmarks import report, tables
from benchmarks.outcome import RESULTS


@pytest.fixture
def folder(tmp_path):
    """A page that asks for the table of the CPU and for the GPU's part, and the results."""
    (tmp_path / "cpu.json").write_text((RESULTS / "cpu.json").read_text())
    (tmp_path / "README.md").write_text(
        "before\n<!-- benchmark:cpu -->\nold\n<!-- end -->\nbetween\n"
        "<!-- benchmark:gpu -->\n<!-- end -->\nafter\n"
    )
    return tmp_path


def run(folder, *options):
    arguments = ["--results", str(folder), "--pages", str(folder / "README.md"), *options]
    return report.main(arguments)


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_pages_are_what_the_results_say():
    assert report.main(["--check"]) == 0


def test_a_page_that_is_out_of_date_is_found_and_mended(folder):
    assert run(folder, "--check") == 1
    assert run(folder) == 0
    assert run(folder, "--check") == 0
    text = (folder / "README.md").read_text()
    assert "old" not in text
    assert report.NO_GPU in text
    data = json.loads((folder / "cpu.json").read_text())
    lines = [line for line in text.split("\nbetween\n")[0].splitlines() if line[:2] == "| "]
    ours = [row for row in data["rows"] if row["impl"] == "klfast"]
    for line, row in zip(lines[1:], ours, strict=True):
        assert f"| {row['dtype']} | {row['median_ms']:.3g} |" in line
        assert line.startswith(f"| {row['shape']} {tables.OPS[row['op']]} |")


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
