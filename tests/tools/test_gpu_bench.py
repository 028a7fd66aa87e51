"""The benchmark's GPU part, without one: its logic on CPU tensors and a device that is a fake."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import FakeGpu

from benchmarks import command, measure, timing, tokens
from benchmarks.__main__ import main
from benchmarks.candidates import build_gpu_candidates
from benchmarks.cases import DTYPES, Case, boundaries, make_inputs
from benchmarks.measure import Ceilings, GpuBench, Plan, Skip, check_candidates, gpu_rows
from benchmarks.suites import OPS, SUITES
from benchmarks.timing import GRAPH_CALLS, HOST_CALLS, Cuda, GpuTiming, Timing, time_on

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
QUICK = ["--device", "cuda", "--quick", "--no-compile"]


@pytest.fixture
def fake_gpu(monkeypatch):
    """`python -m benchmarks --device cuda`, on the CPU."""
    monkeypatch.setattr(command, "find_place", lambda: CPU)
    monkeypatch.setattr(measure, "Cuda", FakeGpu)
    monkeypatch.setattr(measure, "_CEILING_BYTES", 1 << 20)
    monkeypatch.delenv("KLFAST_REQUIRE_CUDA", raising=False)


@pytest.mark.parametrize("sequences", [1, 2, 3, 64])
def test_packed_lengths_differ_and_add_up(sequences):
    lengths = boundaries(sequences, 100).diff()
    assert lengths.sum() == 100 * sequences
    assert lengths.min() == (100 if sequences == 1 else 25)
    assert lengths.max() == (100 if sequences == 1 else 175)


@pytest.mark.parametrize("op", SUITES["tokens"].gpu_ops)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_candidate_of_packed_tokens_is_right(op, dtype):
    case = Case(OPS[op], dtype, (6, 130), packed=True)
    built = build_gpu_candidates(case, ["native", "reference"], ())
    found = check_candidates(built, case.op, make_inputs(case, 1)[0])
    assert list(found) == ["native", "reference", "eager"]


def test_kernels_are_timed_cold_and_graphs_warm():
    device = FakeGpu()
    timing = time_on(device, {"a": lambda: time.sleep(1e-4)}, 4)["a"]
    assert device.log.count(("queue", True)) == len(timing.kernel.seconds) == 4
    assert device.log.count(("queue", False)) == len(timing.graph.seconds) == 3
    assert ("capture", GRAPH_CALLS) in device.log
    assert timing.host.calls == HOST_CALLS
    for each in (timing.kernel, timing.graph, timing.host):  # of a graph, of each of its calls
        assert 1e-4 <= each.median < 5e-3
    assert timing.peak_bytes == 4096


@pytest.mark.parametrize("cold", [False, True])
def test_events_enclose_the_call_alone_behind_a_head_start(monkeypatch, cold):
    """With torch.cuda played by a log: what a GPU is asked for, in what order."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 2.0  # ms

    cache = SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cache)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(("sleep", cycles)))
    monkeypatch.setattr(timing, "LEAST_FLUSH", 1)
    device = Cuda(CPU)
    assert device._flush.nbytes == 2 * cache.L2_cache_size
    read_back = SimpleNamespace(amax=lambda: log.append("read"))
    device._flush = SimpleNamespace(zero_=lambda: log.append("flush"), view=lambda dtype: read_back)
    read = device.queue(lambda: log.append("call"), cold=cold, head_start=1e-3)
    (sleep, cycles), *rest = log
    assert sleep == "sleep"
    assert cycles / 2e9 > 2e-3
    assert rest == [*(["flush", "read"] if cold else []), "event", "call", "event"]
    assert read() == pytest.approx(2e-3)


def test_rows_hold_what_the_clock_and_the_bytes_say():
    case = Case(OPS["one-read"], "fp32", (1000, 1000))

    def timing(ms):
        return GpuTiming(
            Timing([ms / 1e3, ms / 2e3, ms / 1e3], 1), None, Timing([5e-6], HOST_CALLS), 12
        )

    timings = {"native": timing(2), "eager": timing(8), "read": timing(1), "copy": timing(3)}
    rows = gpu_rows(case, timings, Ceilings(18.0, 13.0, 1.0))
    ours, eager, read, copy = (SimpleNamespace(**row) for row in rows)
    assert (ours.kernel_ms, ours.kernel_min_ms, ours.ratio, ours.rounds) == (2, 1, 1, 3)
    assert (eager.ratio, read.ratio, copy.ratio) == (4, None, None)
    assert (ours.bytes, read.bytes, copy.bytes) == (13_000_000, 9_000_000, 18_000_000)
    assert (ours.gb_per_s, read.gb_per_s, copy.gb_per_s) == pytest.approx((6.5, 9, 6))
    assert (ours.read_share, ours.copy_share) == pytest.approx((6.5 / 18, 0.5))
    assert (ours.graph_ms, ours.host_ms, ours.peak_bytes) == (None, pytest.approx(5e-3), 12)


def test_a_budget_is_shared_by_the_cases_that_are_left(fake_gpu):
    bench = GpuBench(CPU, Plan(rounds=1, budget=100.0), [Case(OPS["forward"], "fp32", (4, 8))] * 4)
    assert bench.next_case(0.0) == 25
    assert bench.next_case(30.0) == pytest.approx(70 / 3)
    with pytest.raises(Skip, match="the budget of 100 s was used up"):
        bench.next_case(100.0)


@pytest.mark.parametrize(
    "suite", ["tokens", "logits", pytest.param("linear", marks=pytest.mark.exhaustive)]
)
def test_the_command_measures_prints_and_writes(fake_gpu, tmp_path, capsys, suite):
    out = tmp_path / "gpu.json"
    options = ["--suite", suite, "--dtypes", "bf16", "--out", str(out)]
    assert main([*QUICK, *options]) == 0
    data = json.loads(out.read_text())
    assert data["finished"]
    assert data["failed"] == data["skipped"] == {}
    assert {row["op"] for row in data["rows"]} == set(SUITES[suite].gpu_ops)
    printed = capsys.readouterr().out
    plain = {"products"} if suite == "linear" else {"read", "copy"}
    for name in dict.fromkeys(row["case"] for row in data["rows"]):
        assert name in printed
        rows = {row["impl"]: row for row in data["rows"] if row["case"] == name}
        assert {"native", "eager", *plain} <= set(rows)
        assert next(iter(rows)) == "native"
        assert all(0 < row["kernel_min_ms"] <= row["kernel_ms"] for row in rows.values())
    assert any(row["packed"] for row in data["rows"]) == (suite == "tokens")


def test_a_wrong_baseline_is_no_result_and_hides_none(fake_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(tokens.SUMS, "token-mean", lambda masked, *_: masked.sum())
    out = tmp_path / "gpu.json"
    assert main([*QUICK, "--dtypes", "fp32", "--out", str(out)]) == 1
    data = json.loads(out.read_text())
    cases = ["one-read fp32 16x256", "one-read fp32 16x256 packed"]
    assert list(data["failed"]) == [f"{case}, eager" for case in cases]
    for case in cases:
        impls = {row["impl"] for row in data["rows"] if row["case"] == case}
        assert "eager" not in impls
        assert "native" in impls
    failure = "failed: one-read fp32 16x256, eager: WrongResult: eager computes a wrong penalty"
    assert failure in capsys.readouterr().out


@pytest.mark.parametrize("left_out", ["eager", "native"])
def test_a_baseline_may_run_out_of_memory_and_klfast_may_not(left_out, recwarn):
    def hungry(*tensors):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")

    case, failed = Case(OPS["kl"], "bf16", (6, 130)), {}
    built = {**build_gpu_candidates(case, ["native"], ()), left_out: hungry}
    assert left_out not in check_candidates(built, case.op, make_inputs(case, 1)[0], failed)
    assert [*failed] == ([] if left_out == "eager" else ["native"])
    assert len(recwarn) == (left_out == "eager")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--packed", "4x64"], "--packed needs --device cuda"),
        (["--device", "cuda", "--keep-memory"], "--keep-memory needs --device cpu"),
        (["--device", "cuda"], "torch sees no CUDA device here"),
    ],
)
def test_a_device_that_does_not_fit_the_options_is_a_mistake(
    monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_events_graphs_and_peaks_of_a_device():
    """The bandwidth and the memory that a plain copy of 256 MiB shows are those of a GPU."""
    device = Cuda(torch.device("cuda", 0))
    source = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    timing = time_on(device, {"clone": source.clone}, 5)["clone"]
    assert timing.capture_error is None
    assert timing.peak_bytes == source.nbytes
    for seconds in (timing.kernel.median, timing.graph.median):
        assert 5e10 < 2 * source.nbytes / seconds < 5e13
