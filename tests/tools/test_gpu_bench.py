"""The benchmark's GPU part without a GPU, on CPU tensors and a fake device."""

import json

import pytest
import torch
from fake_gpu import FakeGpu

from benchmarks import measure, timing
from benchmarks.__main__ import main
from benchmarks.suites import SUITES
from benchmarks.timing import Cuda, time_on

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
