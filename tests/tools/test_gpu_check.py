"""What needs a GPU, without one: no failure is hidden, and the benchmark times a fake device."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGpu

from benchmarks import command, gpu_check, measure, timing
from benchmarks.__main__ import main
from benchmarks.gpu_check import judge
from benchmarks.suites import SUITES
from benchmarks.timing import Cuda, time_on

ROOT = Path(__file__).parents[2]


def test_every_step_names_what_is_there():
    """A machine without a GPU would not notice a missing test or option."""
    steps = [step for phase in gpu_check.PHASES.values() for step in phase]
    for step in steps:
        paths = [part.removeprefix("--ignore=") for part in step.command if part.endswith(".py")]
        assert all((ROOT / path).is_file() for path in paths), step.name
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    suites = {}
    for step in steps[-2:]:
        options = step.command[step.command.index("benchmarks") + 1 :]
        given = [part.format(budget=60) for part in options]
        arguments = parser.parse_args(given)
        suites[arguments.out.name] = (arguments.device, arguments.suite, arguments.budget)
    assert suites == {"gpu.json": ("cuda", "tokens", 60), "gpu-logits.json": ("cuda", "logits", 60)}
    assert list(suites) == list(gpu_check.RESULTS)


SANITIZER = gpu_check.sanitizer("memcheck")
TESTS = gpu_check.suite("tests")


@pytest.mark.parametrize(
    ("step", "code", "output", "status"),
    [
        (SANITIZER, 0, "========= ERROR SUMMARY: 0 errors\n", "ok"),
        (SANITIZER, 0, "========= RACECHECK SUMMARY: 1 hazard displayed", "failed"),
        (SANITIZER, 0, "24 passed in 3.00s: but no sanitizer has run", "failed"),
        (TESTS, 0, "== 24 passed, 1 skipped in 75.30s (0:01:15) ==", "ok"),
        (TESTS, 0, "SKIPPED [2] tests/test_a.py:9: no CUDA device\n1 passed in 1.00s", "failed"),
        (TESTS, 0, "SKIPPED [9] tests/conftest.py:9: runs on GPUs\n1 passed in 1.00s", "ok"),
        (TESTS, 1, "1 failed, 23 passed in 3.00s", "failed"),
        (TESTS, 0, "no tests ran in 0.01s", "failed"),
    ],
)
def test_a_success_is_what_has_run_and_found_nothing(step, code, output, status):
    assert judge(step, code, output)[0] == status


pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
QUICK = ["--device", "cuda", "--quick", "--no-compile"]


@pytest.fixture
def fake_gpu(monkeypatch):
    """`python -m benchmarks --device cuda`, on the CPU."""
    monkeypatch.setattr(measure, "find_place", lambda: CPU)
    monkeypatch.setattr(timing, "Cuda", FakeGpu)
    monkeypatch.setattr(measure, "_CEILING_BYTES", 1 << 20)
    monkeypatch.delenv("KLFAST_REQUIRE_CUDA", raising=False)


@pytest.mark.parametrize(
    "suite",
    ["tokens", *(pytest.param(s, marks=pytest.mark.exhaustive) for s in ("logits", "linear"))],
)
def test_the_command_measures_prints_and_writes(fake_gpu, tmp_path, capsys, suite):
    out = tmp_path / "gpu.json"
    options = ["--suite", suite, "--dtypes", "bf16", "--out", str(out)]
    assert main([*QUICK, *options]) == 0
    data = json.loads(out.read_text())
    assert data["finished"]
    assert data["failed"] == data["skipped"] == {}
    assert {row["op"] for row in data["rows"]} == set(SUITES[suite].gpu_ops or SUITES[suite].ops)
    printed = capsys.readouterr().out
    plain = {"products"} if suite == "linear" else {"read", "copy"}
    for name in dict.fromkeys(row["case"] for row in data["rows"]):
        assert name in printed
        rows = {row["impl"]: row for row in data["rows"] if row["case"] == name}
        assert {"native", "eager", *plain} <= set(rows)
        assert next(iter(rows)) == "native"
        assert all(0 < row["kernel_min_ms"] <= row["kernel_ms"] for row in rows.values())
    assert any(row["packed"] for row in data["rows"]) == (suite == "tokens")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_events_graphs_and_peaks_of_a_device():
    """A plain copy of 256 MiB has a GPU's bandwidth and memory."""
    device = Cuda(torch.device("cuda", 0))
    source = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    timing = time_on(device, {"clone": source.clone}, 5)["clone"]
    assert timing.capture_error is None
    assert timing.peak_bytes == source.nbytes
    for seconds in (timing.kernel.median, timing.graph.median):
        assert 5e10 < 2 * source.nbytes / seconds < 5e13
