"""Tables and picture of results; a GPU's are made up here, and are no measurement."""

import itertools
import json
from pathlib import Path

import pytest

from benchmarks import report, tables

ROOT = Path(__file__).parents[2]
BYTES_PER_TOKEN = {"forward": 9, "one-read": 13}
SPEEDS = {"native": 900.0, "triton": 800.0, "eager": 100.0, "torch.compile": 450.0, "read": 1000.0}


def made_up_row(op, shape, impl, packed=False):
    """At a made-up speed: a million bytes and no time beside it give half of it."""
    least = BYTES_PER_TOKEN[op] * shape[0] * shape[1]
    speed = SPEEDS[impl] * least / (least + 1_000_000)
    return {
        "case": f"{op} fp32 {shape[0]}x{shape[1]}" + (" packed" if packed else ""),
        "op": op,
        "dtype": "fp32",
        "shape": shape,
        "packed": packed,
        "impl": impl,
        "kernel_ms": least / speed / 1e6,
        "kernel_min_ms": least / speed / 1e6,
        "graph_ms": None if impl == "eager" else 0.002,
        "host_ms": 0.0125,
        "ratio": None if impl == "read" else SPEEDS["native"] / SPEEDS[impl],
        "rounds": 3,
        "bytes": least,
        "gb_per_s": speed,
        "read_share": speed / 1000,
        "copy_share": speed / 950,
        "peak_bytes": 1_500_000,
    }


@pytest.fixture
def made_up():
    """Results such as `python -m benchmarks --device cuda` writes."""
    places = [([8, 512], False), ([256, 8192], False), ([256, 8192], True)]
    return {
        "conditions": {
            "date": "2000-01-01T00:00:00+00:00",
            "device": "made-up device",
            "clocks": {"clocks.sm": "1 MHz"},
            "versions": {"klfast": "0", "torch": "0"},
            "commit": "0000000",
            "rounds": 3,
            "graph_calls": 10,
            "log_ratio_std": 0.1,
            "ceilings": {"read_gb_per_s": 1000.0, "copy_gb_per_s": 950.0, "nothing_us": 1.0},
        },
        "rows": [
            made_up_row(op, shape, impl, packed)
            for shape, packed in places
            for op in BYTES_PER_TOKEN
            for impl in SPEEDS
        ],
        "skipped": {"forward fp32 4096x16384": "the budget was used up"},
        "failed": {},
    }


LOGITS_SPEEDS = {
    "native": 4000.0,
    "eager": 200.0,
    "selective": 400.0,
    "torch.compile": 2000.0,
    "TRL": 2500.0,
    "read": 4500.0,
}
PEAKS = {
    "klfast": 131_000_000,
    "eager": 1_234_000_000,
    "torch.compile": None,
    "native": 131_000_000,
}


def made_up_logits_rows(kind):
    """``kind``: ``kernel_ms`` as of a GPU, ``median_ms`` as of a CPU."""
    names = LOGITS_SPEEDS
    if kind == "median_ms":
        names = ["klfast", *(n for n in LOGITS_SPEEDS if n not in ("native", "TRL"))]
    for op, dtype in itertools.product(("kl-one-read", "logprob"), ("fp32", "bf16")):
        for impl in names:
            speed = LOGITS_SPEEDS.get(impl, LOGITS_SPEEDS["native"])
            if impl not in ("selective", "TRL") or op == "logprob":
                yield {
                    "case": f"{op} {dtype} 2048x32000",
                    "op": op,
                    "dtype": dtype,
                    "shape": [2048, 32000],
                    "packed": False,
                    "impl": impl,
                    kind: 1e4 / speed,
                    "graph_ms": None,
                    "host_ms": 0.02,
                    "ratio": None if impl == "read" else LOGITS_SPEEDS["native"] / speed,
                    "bytes": 1 << 28,
                    "gb_per_s": speed,
                    "read_share": speed / LOGITS_SPEEDS["read"],
                    "copy_share": speed / LOGITS_SPEEDS["read"],
                    "peak_bytes": PEAKS.get(impl),
                }


@pytest.fixture
def made_up_logits(made_up):
    """Results such as `python -m benchmarks --suite logits` writes."""
    of_inputs = {"suite": "logits", "logits_std": 2.5, "inputs": "rotated", "threads": 2}
    return {
        "conditions": {**made_up["conditions"], **of_inputs},
        "rows": list(made_up_logits_rows("median_ms")),
        "skipped": {},
        "failed": {},
    }


@pytest.fixture
def made_up_gpu_logits(made_up_logits):
    return {**made_up_logits, "rows": list(made_up_logits_rows("kernel_ms"))}


@pytest.fixture
def folder(tmp_path):
    """A page that asks for a table of the CPU and for the GPU's part, and the results."""
    (tmp_path / "cpu.json").write_text((ROOT / "benchmarks/results/cpu.json").read_text())
    (tmp_path / "README.md").write_text(
        "before\n<!-- benchmark:cpu -->\nold\n<!-- end -->\nbetween\n"
        "<!-- benchmark:gpu -->\n<!-- end -->\nafter\n"
    )
    return tmp_path


def run(folder, *options):
    arguments = ["--results", str(folder), "--pages", str(folder / "README.md"), *options]
    return report.main(arguments)


def test_the_pages_are_what_the_results_say():
    assert [page.name for page in report.PAGES] == [
        "README.md",
        *("hidden_states.md", "index.md", "measured.md", "proved.md"),
    ]
    assert report.main(["--check"]) == 0


def test_the_summary_is_of_the_files(folder, made_up_logits):
    (folder / "README.md").write_text("<!-- benchmark:summary -->\n<!-- end -->\n")
    assert run(folder) == 0
    assert report.NOT_MEASURED in (folder / "README.md").read_text()
    (folder / "cpu-logits.json").write_text(json.dumps(made_up_logits))
    assert run(folder) == 0
    found = [line for line in (folder / "README.md").read_text().splitlines() if line[:2] == "| "]
    lines = {cells[0]: cells[1:] for cells in map(cells_of, found[1:])}
    data = json.loads((folder / "cpu.json").read_text())
    for shape in ([512, 8192], [4, 64]):
        for op in tables.SUMMARY["cpu"]:
            rows = [row for row in data["rows"] if (row["shape"], row["op"]) == (shape, op)]
            expected = [
                row["median_ms"] if impl == "klfast" else row["ratio"]
                for dtype in ("fp32", "bf16")
                for impl in ("klfast", "eager", "torch.compile")
                for row in rows
                if (row["dtype"], row["impl"]) == (dtype, impl)
            ]
            shown = [float(cell.rstrip("x")) for cell in lines.pop(f"k3 {shape} {tables.OPS[op]}")]
            assert shown == pytest.approx(expected, rel=0.05)
    assert list(lines) == [f"[2048, 32000] {tables.OPS[op]}" for op in ("kl-one-read", "logprob")]
    assert lines["[2048, 32000] log-prob forward"] == ["2.5", "20x", "2x"] * 2


def test_what_is_not_what_the_results_say_is_found_and_mended(folder, capsys):
    assert run(folder, "--check") == 1
    assert "README.md is not what the results say" in capsys.readouterr().out
    assert run(folder) == 0
    assert run(folder, "--check") == 0
    text = (folder / "README.md").read_text()
    assert "old" not in text
    assert [part in text for part in ("before\n", "\nbetween\n", "\nafter\n")] == [True] * 3


def test_every_number_of_a_table_is_of_the_file(folder):
    run(folder)
    data = json.loads((folder / "cpu.json").read_text())
    text = (folder / "README.md").read_text().split("\nbetween\n")[0]
    lines = [line for line in text.splitlines() if line[:2] == "| "]
    ours = [row for row in data["rows"] if row["impl"] == "klfast"]
    assert len(lines) == len(ours) + 1
    for line, row in zip(lines[1:], ours, strict=True):
        assert f"| {row['dtype']} | {row['median_ms']:.3g} |" in line
        assert line.startswith(f"| {row['shape']} {tables.OPS[row['op']]} |")


def part_on_gpus(folder):
    """The generated text, and the cells of its tables' lines by what they measure."""
    text = (folder / "README.md").read_text().split("<!-- benchmark:gpu -->\n")[1]
    text = text.split("<!-- end -->")[0]
    lines = [cells_of(line) for line in text.splitlines() if line.startswith(("| [", "| packed ["))]
    return text, {(cells[0], cells[1]): cells[2:] for cells in lines}


def planned_lines(name):
    """(label, dtype) of each case that `make gpu-check` measures."""
    return [
        (
            ("packed " if case.packed else "") + f"{[*case.shape]} {tables.OPS[case.op.name]}",
            case.dtype,
        )
        for case in report.planned()[name][1]
    ]


def test_without_a_gpus_results_every_case_is_pending(folder):
    run(folder)
    text, lines = part_on_gpus(folder)
    assert text.startswith(report.NO_GPU)
    assert text.count("`make gpu-check PYTHON=python3`") == 2
    for name in ("topk", "linear --dtypes bf16"):
        file = f"gpu-{name.partition(' ')[0]}.json"
        assert text.count(f"--suite {name} --out benchmarks/results/{file}`") == 1
    assert list(lines) == [line for name in report.PLANS for line in planned_lines(name)]
    assert {cell for cells in lines.values() for cell in cells} == {report.PENDING, ""}
    assert all(cells[:2] == [report.PENDING] * 2 for cells in lines.values())
    assert not (folder / "gpu.md").exists()


def test_what_is_pending_has_the_columns_of_what_was_measured(
    folder, made_up, made_up_gpu_logits, monkeypatch
):
    some = {"selective": "selective", **dict.fromkeys(tables.COMPARED["linear"], "another")}
    monkeypatch.setattr(tables, "SOME_RIVALS", some)
    run(folder)
    before = [line for line in part_on_gpus(folder)[0].splitlines() if "| dtype |" in line]
    (folder / "gpu.json").write_text(json.dumps(made_up))
    (folder / "gpu-logits.json").write_text(json.dumps(made_up_gpu_logits))
    run(folder)
    after = [line for line in part_on_gpus(folder)[0].splitlines() if "CUDA C++, us |" in line]
    assert before == after


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_logits_have_their_rivals_and_their_memory(folder, made_up_logits):
    (folder / "cpu-logits.json").write_text(json.dumps(made_up_logits))
    (folder / "README.md").write_text("<!-- benchmark:cpu-logits -->\n<!-- end -->\n")
    assert run(folder) == 0
    assert run(folder, "--check") == 0
    lines = (folder / "README.md").read_text().splitlines()
    assert cells_of(lines[1]) == [
        "tokens x vocabulary, every token kept",
        "dtype",
        "klfast, ms",
        "vs eager",
        "vs `torch.compile`",
        "vs selective",
        "GB/s",
        "of read bandwidth",
        "MB above the inputs: klfast / eager / `torch.compile`",
    ]
    kl, _, logprob, _ = [cells_of(line) for line in lines[3:7]]
    assert kl[:6] == ["mean KL, forward + backward, one read", "fp32", "2.5", "20x", "2x", ""]
    assert kl[6:] == ["4000.0", "89 %", "131 / 1234 / -"]
    assert logprob[3:6] == ["20x", "2x", "10x"]
    assert "[2048, 32000], made-up device, 2 threads" in lines[8]


def test_a_gpu_has_tables_of_both_levels(folder, made_up, made_up_gpu_logits):
    (folder / "gpu.json").write_text(json.dumps(made_up))
    (folder / "gpu-logits.json").write_text(json.dumps(made_up_gpu_logits))
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
    assert "[256, 8192] forward to per-sequence sums" in everything


def test_a_line_of_kernels(made_up):
    case = next(c for c in tables.cases_of(made_up) if "256x8192" in tables.ours(c)["case"])
    line = tables.kernel_table([case]).splitlines()[-1]
    cells = cells_of(line)
    row = case["native"]
    assert cells[:2] == ["[256, 8192] forward to per-sequence sums", "fp32"]
    assert cells[2] == f"{row['kernel_ms'] * 1e3:.3g}"
    assert cells[4:7] == ["9x", "2x", ""]  # eager, torch.compile, and a rival that was left out
    assert cells[7] == f"{row['gb_per_s']:.3g}"
    assert cells[-1] == "1.5"


def test_results_that_are_not_there_are_named(folder):
    (folder / "README.md").write_text("<!-- benchmark:nothing -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="no results for benchmark:nothing; expected one of 'cpu'"):
        run(folder)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (1e-5, "<0.001"),
        (0.0577, "0.0577"),
        (2.5, "2.5"),
        (999.4, "999"),
        (3456.7, "3457"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert tables.number(value) == text


@pytest.mark.parametrize(
    ("others", "allowed", "load"),
    [
        (0.0123, False, "was 1.2 % of the cores' time."),
        (0.5, True, "was 50.0 % of the cores' time (a load was allowed)."),
        (None, True, "is not known (a load was allowed)."),
    ],
)
@pytest.mark.parametrize("suite", ["tokens", "logits", "topk", "linear"])
def test_a_table_of_a_cpu_says_in_what_state_the_machine_was(
    made_up_logits, suite, others, allowed, load
):
    state = {"memory": "kept by the process", "others_share": others, "load_allowed": allowed}
    made_up_logits["conditions"].update(state, suite=suite)
    text = tables.cpu_block(made_up_logits)
    assert text.endswith(f"Freed memory: kept by the process. What other processes took {load}")
    assert ("as verl 0.9 with `use_chunked_topk`" in text) == (suite == "topk")
    assert ("as TRL's `selective_log_softmax`" in text) == (suite == "logits")
    assert ("of all tokens at once or of as many as klfast takes" in text) == (suite == "linear")


def test_of_sizes_that_were_timed_the_fastest_has_the_column(made_up_logits):
    first, *_ = made_up_logits["rows"]
    for size, ratio in ((128, 3.0), (256, 2.0), (512, 4.0)):
        row = {**first, "impl": f"linear_cross_entropy {size}", "ratio": ratio}
        made_up_logits["rows"].append({**row, "peak_bytes": size * 1_000_000})
    heading, _, line, *_ = tables.cpu_table(made_up_logits).splitlines()
    cells = dict(zip(heading.split(" | "), line.split(" | "), strict=True))
    assert cells["vs `linear_cross_entropy`"] == "2x"
