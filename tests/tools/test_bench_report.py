"""Tables of results; a GPU's are made up here, and are no measurement."""

import itertools
import json

import pytest

from benchmarks import report, tables
from benchmarks.outcome import RESULTS

SPEEDS = {
    "native": 4000.0,
    "eager": 200.0,
    "selective": 400.0,
    "torch.compile": 2000.0,
    "TRL": 2500.0,
    "read": 4500.0,
}
PEAKS = {"native": 131_000_000, "eager": 1_234_000_000, "torch.compile": None}


@pytest.fixture
def made_up():
    """Results such as `python -m benchmarks --device cuda --suite logits` writes."""
    rows = [
        {
            "case": f"{op} {dtype} 2048x32000",
            "op": op,
            "dtype": dtype,
            "shape": [2048, 32000],
            "packed": False,
            "impl": impl,
            "kernel_ms": 1e4 / speed,
            "graph_ms": None,
            "host_ms": 0.02,
            "ratio": None if impl == "read" else SPEEDS["native"] / speed,
            "bytes": 1 << 28,
            "gb_per_s": speed,
            "read_share": speed / SPEEDS["read"],
            "copy_share": speed / SPEEDS["read"],
            "peak_bytes": PEAKS.get(impl),
        }
        for op, dtype in itertools.product(("kl-one-read", "logprob"), ("fp32", "bf16"))
        for impl, speed in SPEEDS.items()
        if impl not in ("selective", "TRL") or op == "logprob"
    ]
    conditions = {
        "date": "2000-01-01T00:00:00+00:00",
        "device": "made-up device",
        "clocks": {"clocks.sm": "1 MHz"},
        "versions": {"klfast": "0", "torch": "0"},
        "commit": "0000000",
        "suite": "logits",
        "rounds": 3,
        "graph_calls": 10,
        "log_ratio_std": 0.1,
        "ceilings": {"read_gb_per_s": 1000.0, "copy_gb_per_s": 950.0, "nothing_us": 1.0},
    }
    skipped = {"kl fp32 8192x151936": "the budget was used up"}
    return {"conditions": conditions, "rows": rows, "skipped": skipped, "failed": {}}


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
    assert [page.name for page in report.PAGES] == [
        "README.md",
        *("index.md", "measured.md", "proved.md"),
    ]
    assert report.main(["--check"]) == 0


def test_a_page_that_is_out_of_date_is_found_and_mended(folder):
    assert run(folder, "--check") == 1
    assert run(folder) == 0
    assert run(folder, "--check") == 0
    text = (folder / "README.md").read_text()
    assert "old" not in text
    assert report.NO_GPU in text
    assert [part in text for part in ("before\n", "\nbetween\n", "\nafter\n")] == [True] * 3
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


def test_a_gpu_has_a_table_on_the_page_and_one_of_all_cases(folder, made_up):
    (folder / "gpu-logits.json").write_text(json.dumps(made_up))
    assert run(folder) == 0
    assert run(folder, "--check") == 0
    readme, everything = (folder / "README.md").read_text(), (folder / "gpu.md").read_text()
    line = next(line for line in readme.splitlines() if "[2048, 32000] log-prob forward" in line)
    cells = cells_of(line)
    assert cells[1:4] == ["bf16", "2500", ""]  # and no Triton of ours
    assert cells[4:9] == ["20x", "2x", "", "10x", "1.6x"]  # max-autotune was left out
    assert cells[-1] == "131 / 1234 / -"
    assert "log-prob forward | fp32" not in readme
    assert "log-prob forward | fp32" in everything
    assert "kl fp32 8192x151936: the budget was used up" in readme


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (1e-5, "<0.001"), (0.0577, "0.0577"), (999.4, "999"), (3456.7, "3457")],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert tables.number(value) == text
