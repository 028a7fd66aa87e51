"""The benchmark's GPU part, without one: its logic on CPU tensors and a device that is a fake."""

import json
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import FakeGpu
from small_cases import small

from benchmarks import command, linear, measure, rivals, timing, tokens
from benchmarks.__main__ import main
from benchmarks.candidates import AUTOTUNED, COMPILE, MODES, build_gpu_candidates
from benchmarks.cases import DTYPES, Case, boundaries, make_inputs
from benchmarks.linear import OPS as LINEAR_OPS
from benchmarks.logits import OPS as LOGITS_OPS
from benchmarks.measure import (
    Ceilings,
    GpuBench,
    Plan,
    Skip,
    check_candidates,
    gpu_rows,
    modes_within,
    usable_backends,
)
from benchmarks.suites import OPS, SUITES
from benchmarks.timing import GRAPH_CALLS, HOST_CALLS, Cuda, GpuTiming, Timing, alternate, time_on
from benchmarks.topk import OPS as TOPK_OPS
from klfast import backends

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TOKENS, LOGITS = SUITES["tokens"], SUITES["logits"]
token_ops = pytest.mark.parametrize(
    "op", [OPS[name] for name in TOKENS.gpu_ops], ids=TOKENS.gpu_ops
)
OVER_LOGITS = {**LOGITS_OPS, **TOPK_OPS}
OVER_LOGITS |= LINEAR_OPS
logits_ops = pytest.mark.parametrize("op", OVER_LOGITS.values(), ids=OVER_LOGITS)
LOGITS_COMMAND = ["--device", "cuda", "--suite", "logits", "--quick", "--no-compile"]


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
    assert torch.equal(lengths, boundaries(sequences, 100).diff())


@token_ops
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_candidate_is_right(op, dtype, packed):
    case = Case(op, dtype, (6, 130), packed)
    inputs = make_inputs(case, 1)[0]
    assert inputs.storage.nbytes - case.input_bytes < 3 * 64
    built = build_gpu_candidates(case, ["native", "reference"], ())
    assert list(check_candidates(built, op, inputs)) == ["native", "reference", "eager"]


@logits_ops
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_candidate_over_logits_is_right(op, dtype):
    case = small(op, dtype)
    built = build_gpu_candidates(case, ["native", "reference"], (), {"other": op.klfast()})
    rival = [*op.eager()][1:]
    assert len(rival) == {"logprob": 1, "topk": 1, "linear": 2}.get(
        op.name.partition("-")[0], 0
    ) + len(linear.torchs()) * (op.name == "linear-logprob")
    names = ["native", "reference", "eager", *rival, "other"]
    assert list(check_candidates(built, op, make_inputs(case, 1)[0])) == names


def test_from_hidden_states_bare_products_are_timed_and_no_read(fake_gpu, tmp_path):
    out = tmp_path / "gpu.json"
    options = ["--device", "cuda", "--suite", "linear", "--quick", "--no-compile"]
    assert main([*options, "--dtypes", "bf16", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["failed"] == data["skipped"] == {}
    for op in LINEAR_OPS:
        rows = {row["impl"]: row for row in data["rows"] if row["op"] == op}
        assert {"native", "eager", "held logits", "checkpoint", "products"} <= set(rows)
        assert not {"read", "copy"} & set(rows)
        assert rows["products"]["ratio"] > 0
    assert all(probe.startswith("products of") for probe in data["probes"].values())


def test_a_round_is_queued_whole_before_any_time_is_read_and_the_order_alternates():
    log = []

    def measured(name):
        def queue():
            log.append(name)
            return lambda: log.append(f"read {name}") or float(len(log))

        return queue

    seconds = alternate({name: measured(name) for name in "ab"}, 2, lambda: log.append("wait"))
    assert log == [*"ab", "wait", "read a", "read b", *"ba", "wait", "read b", "read a"]
    assert seconds == {"a": [4, 10], "b": [5, 9]}


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


def test_a_long_call_is_in_no_graph_and_queued_once_at_a_time(monkeypatch):
    monkeypatch.setattr(timing, "LONG_CALL", 1e-3)
    device, calls = FakeGpu(), []
    both = {"long": lambda: calls.append(1) or time.sleep(2e-3), "short": lambda: None}
    timings = time_on(device, both, 4)
    assert device.log.count(("capture", GRAPH_CALLS)) == 1
    assert timings["long"].graph is timings["long"].capture_error is None
    assert (timings["long"].host.calls, timings["short"].host.calls) == (1, HOST_CALLS)
    assert len(timings["long"].kernel.seconds) == 4
    assert len(calls) < 2 * HOST_CALLS


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


def test_what_cannot_be_captured_says_why_and_is_timed_otherwise():
    class NoGraphs(FakeGpu):
        def capture(self, call, calls):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    timing = time_on(NoGraphs(), {"a": lambda: None}, 1)["a"]
    assert timing.graph is None
    assert timing.capture_error.startswith("RuntimeError: operation not permitted")
    assert "\n" not in timing.capture_error


def test_rows_hold_what_the_clock_and_the_bytes_say():
    case = Case(OPS["one-read"], "fp32", (1000, 1000))

    def timing(ms):
        return GpuTiming(
            Timing([ms / 1e3, ms / 2e3, ms / 1e3], 1), None, Timing([5e-6], HOST_CALLS), 12
        )

    timings = {"native": timing(2), "eager": timing(8), "read": timing(1), "copy": timing(3)}
    ours, eager, read, copy = gpu_rows(case, timings, Ceilings(18.0, 13.0, 1.0))
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


def test_a_case_that_is_short_of_time_does_without_autotuning():
    assert modes_within(100.0, with_compile=True) == tuple(MODES)
    assert modes_within(100.0, with_compile=False) == ()
    with pytest.warns(UserWarning, match=f"{AUTOTUNED} is left out, to stay within the budget"):
        assert modes_within(1.0, with_compile=True) == (COMPILE,)


def test_a_promised_gpu_needs_every_backend(monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "missing", SimpleNamespace(why_not=lambda _: "why"))
    monkeypatch.setattr(measure, "KLFAST_BACKENDS", ("native", "missing"))
    monkeypatch.delenv("KLFAST_REQUIRE_CUDA", raising=False)
    assert usable_backends(CPU) == (["native"], "missing: why")
    monkeypatch.setenv("KLFAST_REQUIRE_CUDA", "1")
    with pytest.raises(measure.NoBackend, match="klfast cannot be timed on cpu: missing: why"):
        usable_backends(CPU)


def test_the_command_measures_prints_and_writes(fake_gpu, tmp_path, capsys):
    out = tmp_path / "gpu.json"
    options = ["--device", "cuda", "--quick", "--no-compile", "--out", str(out)]
    assert main(options) == 0
    data = json.loads(out.read_text())
    assert data["finished"]
    assert data["failed"] == data["skipped"] == {}
    names = [f"{op} {dtype} 16x256" for op in TOKENS.gpu_ops for dtype in DTYPES]
    names += [f"{name} packed" for name in names]
    assert list(dict.fromkeys(row["case"] for row in data["rows"])) == names
    assert set(data["probes"]) == set(names)
    printed = capsys.readouterr().out
    for name in names:
        assert name in printed
        rows = {row["impl"]: row for row in data["rows"] if row["case"] == name}
        assert {"native", "eager", "read", "copy"} <= set(rows)
        assert next(iter(rows)) == "native"
        assert all(0 < row["kernel_min_ms"] <= row["kernel_ms"] for row in rows.values())
    where = data["conditions"]
    assert set(where["versions"]) == {"klfast", "torch", "python", "triton", "cuda"}
    assert where["ceilings"]["read_gb_per_s"] > 0
    assert {"device", "clocks", "date", "commit", "graph_calls"} <= set(where)


def test_a_wrong_rival_is_no_result_and_hides_none(fake_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(tokens.SUMS, "token-mean", lambda masked, *_: masked.sum())
    out = tmp_path / "gpu.json"
    options = ["--device", "cuda", "--quick", "--no-compile", "--dtypes", "fp32"]
    assert main([*options, "--out", str(out)]) == 1
    data = json.loads(out.read_text())
    cases = ["one-read fp32 16x256", "one-read fp32 16x256 packed"]
    assert list(data["failed"]) == [f"{case}, eager" for case in cases]
    for case in cases:
        impls = {row["impl"] for row in data["rows"] if row["case"] == case}
        assert "eager" not in impls
        assert "native" in impls
    failure = "failed: one-read fp32 16x256, eager: WrongResult: eager computes a wrong penalty"
    assert failure in capsys.readouterr().out


def test_a_case_without_klfast_fails_and_hides_none(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "KLFAST_BACKENDS", ("native",))
    forward = tokens.TokensOp.klfast

    def broken(op, backend="auto", normalizer=None):
        def fail(*tensors):
            raise RuntimeError("no kernel image\nand a long trace")

        fails = op.backward and backend != "reference"
        return fail if fails else forward(op, backend, normalizer)

    monkeypatch.setattr(tokens.TokensOp, "klfast", broken)
    out = tmp_path / "gpu.json"
    options = ["--device", "cuda", "--quick", "--no-compile", "--dtypes", "fp32"]
    assert main([*options, "--out", str(out)]) == 1
    data = json.loads(out.read_text())
    assert data["failed"]["two-pass fp32 16x256"] == "NoBackend: no backend of klfast works"
    assert data["failed"]["two-pass fp32 16x256, native"] == "RuntimeError: no kernel image"
    assert {row["op"] for row in data["rows"]} == {"forward"}


def test_what_does_not_fit_is_left_out_visibly(fake_gpu, monkeypatch, capsys):
    monkeypatch.setattr(measure, "Cuda", lambda place: FakeGpu(place, free=1 << 16))
    options = ["--device", "cuda", "--quick", "--no-compile", "--ops", "forward"]
    assert main(options) == 0
    assert "left out: forward fp32 16x256: needs 0.0 GiB of memory" in capsys.readouterr().out


def fake_liger():
    """The two functions that are used, on log-probs, as their docstrings say."""

    def liger_jsd(policy, reference, beta):
        p, q = policy.exp(), reference.exp()
        mixture = (beta * q + (1 - beta) * p).log()
        rows = beta * q * (reference - mixture) + (1 - beta) * p * (policy - mixture)
        if beta == 1:
            rows = p * (policy - reference)
        return rows.sum(-1).mean()

    def liger_kl_div(prediction, target, reduction, log_target):
        assert (reduction, log_target) == ("none", True)
        return target.exp() * (target - prediction)

    return SimpleNamespace(liger_jsd=liger_jsd, liger_kl_div=liger_kl_div)


def test_other_libraries_are_timed_where_they_are_installed(fake_gpu, monkeypatch, tmp_path):
    def load(name):
        if name.startswith("trl"):
            raise ModuleNotFoundError(f"No module named '{name}'\nand more")
        return fake_liger()

    monkeypatch.setattr(rivals, "import_module", load)
    out = tmp_path / "gpu.json"
    options = ["--shapes", "3x50", "--dtypes", "bf16", "--out", str(out)]
    assert main([*LOGITS_COMMAND, *options]) == 0
    data = json.loads(out.read_text())
    assert data["failed"] == data["skipped"] == {}
    assert {row["op"] for row in data["rows"]} == set(LOGITS.gpu_ops)
    timed = {row["op"] for row in data["rows"] if row["impl"] == "Liger"}
    assert timed == {"kl", "kl-one-read", "jsd-one-read"}
    reason = "not timed: TRL: ModuleNotFoundError: No module named 'trl.kernels.logprob_entropy'"
    assert reason in data["notes"]
    assert data["conditions"]["suite"] == "logits"


@pytest.mark.parametrize("left_out", [True, False], ids=["eager", "klfast"])
def test_a_rival_may_run_out_of_memory_and_klfast_may_not(left_out):
    def hungry(*tensors):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")

    op = OPS["kl"]
    case, failed = Case(op, "bf16", (6, 130)), {}
    built = build_gpu_candidates(case, ["native"], ())
    built["eager" if left_out else "native"] = hungry
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_candidates(built, op, make_inputs(case, 1)[0], failed)
    reason = "OutOfMemoryError: CUDA out of memory. Tried to allocate 40 GiB"
    expected = [f"eager is left out, as it fails here: {reason}"] if left_out else []
    assert [str(warning.message) for warning in caught] == expected
    assert failed == ({} if left_out else {"native": reason})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--packed", "4x64"], "--packed needs --device cuda"),
        (
            ["--device", "cuda", "--suite", "logits", "--packed", "4x64"],
            "--packed needs --suite tokens",
        ),
        (["--budget", "5"], "--budget needs --device cuda"),
        (["--device", "cuda", "--reuse-inputs"], "--reuse-inputs needs --device cpu"),
        (["--device", "cuda", "--keep-memory"], "--keep-memory needs --device cpu"),
        (["--device", "cuda", "--allow-load"], "--allow-load needs --device cpu"),
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
