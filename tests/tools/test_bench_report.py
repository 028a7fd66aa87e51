"""The pages have the tables that ``benchmarks.report`` makes of the results.

The cases that stand in for a GPU are counted from reports of tests alone.
"""

import itertools
import json

import pytest

from benchmarks import proved, report, tables
from benchmarks.outcome import RESULTS
from klfast.backends import BACKENDS


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


GPU = {
    "device": "NVIDIA L4",
    "capability": "8.9",
    "commit": "0123456",
    "date": "2027-01-02T03:04:05+00:00",
    "versions": {"python": "3.13.1", "torch": "2.12.0"},
}
STEPS = [{"name": "build", "status": "ok"}, {"name": "tests", "status": "timeout"}]
CHECK = {"commit": "0123456", "steps": STEPS}
CPU = {"instruction_set": "avx2"}


def test_a_device_is_said_to_run_once_there_are_results_of_it():
    ran = "ran commit 0123456 on 2027-01-02 (Python 3.13.1, torch 2.12.0): tests ran out of time"
    for gpus in ([], [GPU]):
        page = report.devices([CPU], gpus, CHECK).splitlines()
        (line,) = (line for line in page if "A100" in line)
        assert (ran in line) == bool(gpus) != (report.COMPILED in line)
        for version in ("Python 3.13", "torch 2.12"):
            assert (f"| {version} | ran on NVIDIA L4 |  |" in page) == bool(gpus)
        first = report.first_devices(gpus, CHECK)
        assert (ran in first) == bool(gpus) == ("| other NVIDIA GPUs from A100 on;" in first)


def test_what_a_gpu_ran_says_what_failed():
    assert "tests ran out of time" in report.ran(GPU, CHECK, "")
    assert "all checks passed" in report.ran(GPU, {**CHECK, "steps": CHECK["steps"][:1]}, "")
    assert "checks" not in report.ran(GPU, {**CHECK, "commit": "another"}, "")


def test_auto_prefers_the_backend_with_fewer_instructions():
    """By the recorded counts of machine instructions."""
    counts = json.loads((RESULTS / "sass.json").read_text())
    native = [counts["cases"][name]["loop"]["H200"] for name in counts["triton"]]
    assert all(a < b for a, b in zip(native, counts["triton"].values(), strict=True))
    assert list(BACKENDS)[:2] == ["native", "triton"]


CASES = """
<testcase classname="tests.penalty.test_masking" name="test_masked[native-emulated-fp32]"/>
<testcase classname="tests.penalty.test_masking" name="test_masked[native-fp32]"/>
<testcase classname="tests.penalty.test_masking" name="test_gone[native-emulated]">
  <skipped/></testcase>
<testcase classname="tests.gpu.test_triton_interpreted" name="test_kernels[penalty]">
  <properties><property name="interpreted" value="41"/></properties></testcase>
<testcase classname="tests.gpu.test_guarded_memory" name="test_every[native]">
  <properties><property name="guarded" value="2000"/></properties></testcase>
<testcase classname="tests.gpu.test_guarded_memory" name="test_every[native-emulated]">
  <properties><property name="guarded" value="2100"/></properties></testcase>
<testcase classname="tests.gpu.test_launches" name="test_a"/>
<testcase classname="tests.gpu.test_cuda_build" name="test_a"/>
<testcase classname="tests.gpu.test_cuda_build" name="test_b"/>
<testcase classname="tests.gpu.test_triton_compiles" name="test_a"/>
"""
ELSEWHERE = '<testcase classname="tests.tools.test_a" name="test_c"><failure/></testcase>'
COUNTS = {
    "emulator": 2,
    "interpreter": 41,
    "guarded": 2100,
    "launches": 1,
    "compiled": 2,
    "compiled Triton": 1,
}


def test_what_passed_is_counted(tmp_path):
    xml, out = tmp_path / "report.xml", tmp_path / "proved.json"
    xml.write_text(f"<testsuites><testsuite>{CASES}{ELSEWHERE}</testsuite></testsuites>")
    assert proved.main([str(xml), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["cases"] == COUNTS


def test_every_part_of_a_run_on_ptx_is_in_one_line():
    ptx = json.loads((proved.RESULTS / "ptx-coverage-sm90.json").read_text())
    lines = proved.ptx_lines(ptx)
    assert all(count > 0 for _, count, _ in lines)
    assert sum(count for _, count, _ in lines) == ptx["passed"] == ptx["cases"]
