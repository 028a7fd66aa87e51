"""The benchmark: nothing wrong is timed, and the numbers that a table prints are those measured."""

import json
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from small_cases import small

from benchmarks import candidates, check, drop_in, idle, linear, peers, tokens
from benchmarks.__main__ import main
from benchmarks.cases import DTYPES, Case, make_inputs
from benchmarks.check import WrongResult, check_outputs, named_outputs, tolerances, truth
from benchmarks.idle import LIMIT, NOTHING, SLACK, Load, Reading, between, parse_stat
from benchmarks.measure import ATTEMPTS, checked_candidates, is_noisy_row, rows_of
from benchmarks.suites import OPS, SUITES
from benchmarks.timing import Timing, interleave

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["--quick", "--no-compile", "--rounds", "1"]
FORWARD = [*QUICK, "--ops", "forward"]
CASES = ["forward fp32 16x256", "forward bf16 16x256"]
BESIDE = {"logprob": ["selective"], "topk": ["verl"], "linear": ["held logits", "checkpoint"]}
"""An op's first word -> its other baselines."""
LARGE = dict.fromkeys(SUITES, "64x4096") | {
    **dict.fromkeys(("logits", "topk"), "9x70000"),
    "linear": "9x16x70000",
}
"""Inputs that a plain read takes longer than a call."""
ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


# Bytes


@pytest.mark.parametrize(
    ("op", "fp32", "bf16"),
    [
        ("forward", 9, 5),
        ("one-read", 13, 7),
        ("two-pass", 22, 12),
        ("weights", 13, 7),
        ("weights-one-read", 17, 9),
        ("kl", 8, 4),
        ("kl-one-read", 12, 6),
        ("kl-two-pass", 20, 10),
        ("logprob", 4, 2),
        ("logprob-two-pass", 12, 6),
        ("topk", 4, 2),
        ("topk-loss", 12, 6),
    ],
)
def test_bytes_per_number_are_the_least_that_must_move(op, fp32, bf16):
    for dtype, per_number in (("fp32", fp32), ("bf16", bf16)):
        of_entries = {"logprob": 8, "topk": 2 * (8 + 4)}.get(op.partition("-")[0], 0)
        beside = 3 * of_entries * OPS[op].reads  # of each row
        assert Case(OPS[op], dtype, (3, 5)).least_bytes == per_number * 15 + beside


@pytest.mark.parametrize(
    ("op", "weights", "gradients"),
    [("linear-kl-loss", 2, 2), ("linear-kl-frozen", 1, 1), ("linear-logprob", 1, 2)],
)
def test_bytes_from_hidden_states_are_of_rows_of_weights_and_of_gradients(op, weights, gradients):
    of_tokens, of_words = 3 * 2 * 4, 5 * 2 * 4  # of 3 tokens of width 2, 5 words
    case = Case(OPS[op], "fp32", (3, 2, 5))
    ids = 3 * 8 if op == "linear-logprob" else of_tokens
    assert case.input_bytes == of_tokens + weights * of_words + ids
    assert case.gradient_bytes == of_tokens + (gradients - 1) * of_words


# Results


@ops
@dtypes
def test_every_candidate_is_right_and_one_wrong_number_is_found(monkeypatch, op, dtype):
    """In blocks of two rows."""
    monkeypatch.setitem(check._NUMBERS_PER_BLOCK, "cpu", 260)
    monkeypatch.setattr(linear, "_ROWS", 2)
    inputs = make_inputs(small(op, dtype), 1)[0]
    names = ["klfast", "eager", *BESIDE.get(op.name.partition("-")[0], [])]
    names += [*linear.torchs()] * (op.name == "linear-logprob")
    assert list(checked_candidates(op, inputs, with_compile=False)) == names
    expected = truth(op, inputs)
    allowed = tolerances(op, inputs, expected)
    right = candidates.build_candidates(op, with_compile=False)["eager"](inputs)
    for name in named_outputs(op, right):
        assert dtype == "bf16" or allowed[name] < 0.2 * expected[name].abs().max() + 0.01
        wrong = expected[name].clone()
        wrong.view(-1)[-1] += 3 * allowed[name]
        with pytest.raises(WrongResult, match=f"eager computes a wrong {name}"):
            check_outputs("eager", op, right, {**expected, name: wrong}, allowed)


def test_the_floor_of_hidden_states_is_the_bare_products(monkeypatch):
    case = small(OPS["linear-kl-loss"])
    inputs = make_inputs(case, 1)[0]
    hidden, weight, ref_hidden, ref_weight = (tensor.detach() for tensor in inputs.arguments)
    monkeypatch.setattr(linear, "chunk_of", lambda arguments: 4)
    logits = hidden @ weight.t()
    expected = [logits, ref_hidden @ ref_weight.t(), logits @ weight, logits.t() @ hidden]
    whole, in_parts = case.op.floors().values()
    for found, want in zip(
        [*whole(inputs), *in_parts(inputs)], [*expected, *expected[2:]], strict=True
    ):
        torch.testing.assert_close(found, want)


# Times


def test_rounds_alternate_and_inputs_rotate():
    seen = []

    def called(name):
        return lambda inputs: seen.append((name, inputs)) or sum(range(400_000))

    timings = interleave({"a": called("a"), "b": called("b"), "c": called("c")}, [0, 1], 3)
    assert [inputs for _, inputs in seen] == [n % 2 for n in range(len(seen))]
    assert [name for name, _ in seen[-9:]] == [*"abc", *"cba", *"abc"]
    assert len(seen) == 3 * 2 + 9  # two calls of each, untimed, come first
    assert all(len(timing.seconds) == 3 and timing.calls == 1 for timing in timings.values())


def test_ratio_speed_and_share_are_of_medians():
    case = Case(OPS["one-read"], "fp32", (1000, 1000))
    seconds = {
        "klfast": [2e-3, 1e-3, 9e-3],
        "eager": [8e-3] * 3,
        "read": [1e-3] * 3,
        "read + fill": [1.6e-3] * 3,
    }
    timings = {name: Timing(s, 1) for name, s in seconds.items()}
    ours, eager, read, floor = (SimpleNamespace(**row) for row in rows_of(case, timings))
    assert (ours.median_ms, ours.min_ms, ours.ratio) == pytest.approx((2, 1, 1))
    assert [is_noisy_row(vars(row)) for row in (ours, eager)] == [True, False]
    assert eager.ratio == pytest.approx(4)
    assert read.ratio is floor.ratio is None
    assert (ours.bytes, read.bytes, floor.bytes) == (13_000_000, 9_000_000, 13_000_000)
    assert (ours.floor_ratio, eager.floor_ratio) == pytest.approx((1.25, 5))
    assert ours.gb_per_s == pytest.approx(6.5)
    assert ours.read_share == pytest.approx(6.5 / 9)
    assert read.read_share == floor.floor_ratio == 1


# The command


@pytest.mark.parametrize("suite", SUITES)
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, suite):
    out, shape, ops = tmp_path / "bench.json", LARGE[suite], SUITES[suite].ops
    options = ["--suite", suite, "--shapes", shape, "--dtypes", "fp32", "--out", str(out)]
    assert main([*QUICK, "--allow-load", *options]) == 0
    printed = capsys.readouterr().out
    assert SUITES[suite].text in printed
    assert " vs eager " not in printed  # of too few rounds
    data = json.loads(out.read_text())
    assert data["finished"]
    assert data["conditions"]["quick"] is data["conditions"]["load_allowed"] is True
    for name in ops:
        rows = {row["impl"]: row for row in data["rows"] if row["op"] == name}
        plain = {"products"} if suite == "linear" else {"read"}
        plain |= {"read + fill"} if ops[name].backward and suite != "linear" else set()
        assert {"klfast", "eager", *plain} <= set(rows)
        assert all(0 < row["min_ms"] <= row["median_ms"] for row in rows.values())
        assert rows["klfast"]["ratio"] == 1


def test_a_wrong_candidate_ends_the_command(monkeypatch, capsys):
    monkeypatch.setitem(tokens.SUMS, "token-mean", lambda masked, mask: masked.sum())
    assert main([*QUICK, "--ops", "one-read"]) == 1
    printed = capsys.readouterr()
    assert "python -m benchmarks: error: eager computes a wrong penalty (one-read)" in printed.err
    assert printed.out == ""


# Load


STAT = """\
cpu  30 6 12 400 9 3 0 60 0 0
cpu0 10 2 4 300 7 1 2 20 5 5
cpu11 20 4 8 100 2 2 0 40 0 0
intr 1 2
"""


def test_others_are_the_busy_time_without_the_process():
    assert parse_stat(STAT, ticks=100) == {0: pytest.approx(0.39), 11: pytest.approx(0.74)}
    begin = Reading(clock=5.0, own=1.0, busy={0: 10.0, 1: 20.0, 2: 30.0})
    end = Reading(clock=9.0, own=4.0, busy={0: 13.5, 1: 20.0, 2: 32.0})
    assert between(begin, end, {0, 1}) == Load(0.5, 8.0, 2.5, 12.0)


@pytest.mark.parametrize(
    ("load", "share", "is_idle"),
    [
        (NOTHING, 0, True),
        (Load(-0.01, 1, -0.01, 2), 0, True),  # counts come in ticks
        (Load(0.04, 0.08, 0.04, 0.16), 0.5, True),  # too little to tell
        (Load(LIMIT * 10 + SLACK - 0.01, 10, 0, 20), LIMIT + 0.004, True),
        (Load(LIMIT * 10 + SLACK + 0.01, 10, 0, 20), LIMIT + 0.006, False),
        (Load(0, 10, LIMIT * 20 + SLACK + 0.1, 20), LIMIT + 0.0075, False),  # on other cores
    ],
)
def test_idle_is_less_than_the_limit_on_its_cores_and_on_all(load, share, is_idle):
    assert load.share == pytest.approx(share)
    assert load.is_idle == is_idle


BUSY = Load(others=3.0, capacity=10.0, all_others=3.0, all_capacity=20.0)
IDLE = Load(others=0.1, capacity=10.0, all_others=0.1, all_capacity=20.0)


@pytest.fixture
def loads(monkeypatch):
    """What ``idle`` finds: before anything is measured, and in the rounds of each attempt."""
    found = {"before": IDLE, "rounds": [IDLE], "looked": 0}

    def since(begin):
        found["looked"] += 1
        rounds = found["rounds"]
        return rounds.pop(0) if len(rounds) > 1 else rounds[0]

    monkeypatch.setattr(idle, "sample", lambda: found["before"])
    monkeypatch.setattr(idle, "since", since)
    return found


def test_an_idle_machine_is_a_condition_and_an_earlier_file_stays_without_force(loads, tmp_path):
    out = tmp_path / "bench.json"
    assert main([*FORWARD, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert (data["conditions"]["others_share"], data["conditions"]["load_allowed"]) == (0.01, False)
    assert data["loads"] == dict.fromkeys(CASES, 0.01)
    before = out.read_bytes()
    assert main([*FORWARD, "--out", str(out)]) == 2
    assert out.read_bytes() == before
    assert main([*FORWARD, "--out", str(out), "--force"]) == 0


@pytest.mark.parametrize("before", [BUSY, None], ids=["busy", "not-known"])
def test_a_load_before_is_refused_before_anything_is_measured(loads, tmp_path, capsys, before):
    loads["before"] = before
    out = tmp_path / "bench.json"
    assert main([*FORWARD, "--out", str(out)]) == 3
    assert "--allow-load" in capsys.readouterr().err
    assert (loads["looked"], out.exists()) == (0, False)


@pytest.mark.parametrize("earlier", [None, '{"rows": ["of before"]}'], ids=["new", "earlier"])
def test_a_load_in_the_rounds_leaves_the_file_as_it_was(loads, tmp_path, capsys, earlier):
    loads["rounds"] = [IDLE, BUSY]
    out = tmp_path / "bench.json"
    if earlier is not None:
        out.write_text(earlier)
    assert main([*FORWARD, "--out", str(out), "--force"]) == 3
    assert (out.read_text() if out.exists() else None) == earlier
    printed = capsys.readouterr()
    reason = "other processes took 16% of the cores' time, 30% in forward bf16 16x256"
    assert f"NOT IDLE: {reason}" in printed.out
    assert f"{out} was not written: {reason}" in printed.err
    assert loads["looked"] == 1 + ATTEMPTS
    assert (
        f"busy: other processes took more than 5% of the cores' time: {CASES[1]}\n" in printed.out
    )


@pytest.mark.parametrize(("load", "options"), [(0.01, ()), (0.5, ()), (0.5, ("--allow-load",))])
def test_frameworks_functions_are_published_from_an_idle_machine(
    monkeypatch, tmp_path, load, options
):
    def one_pair():
        def value(batch):
            return batch.logprobs - batch.ref_logprobs

        yield peers.Pair("nobody's", "`value`", value, value)

    found = Load(load * 100, 100, load * 100, 1000)
    monkeypatch.setattr(idle, "since", lambda begin: found)
    monkeypatch.setitem(drop_in.PEERS, "trl", {peers.OVER_LOGPROBS: (one_pair,)})
    command = ["drop_in.py", "trl", "--quick", "--out", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", command)
    refused = load > LIMIT and not options
    assert drop_in.main() == (3 if refused else 0)
    file = tmp_path / "drop-in-trl.json"
    assert file.exists() != refused
    if not refused:
        data = json.loads(file.read_text())
        assert data["conditions"]["others_share"] == load
        assert [row["impl"] for row in data["rows"]] == ["framework", "klfast"] * 2


# Memory


def printed_by(code):
    """The JSON that Python code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_known_peaks_are_found():
    known = {
        "None": 0,
        "ones(64)": 64,  # the result counts
        "ones(64).amax()": 64,  # and what was freed
        "ones(64).add(1).add(1)": 128,  # but not all that ever was
    }
    code = (
        "import torch; from benchmarks.memory import peak_of\n"
        "def ones(mib): return torch.ones(mib << 20, dtype=torch.uint8)\n"
        f"print([{', '.join(f'peak_of(lambda: {call})' for call in known)}])"
    )
    found = [peak / 2**20 for peak in printed_by(code)]
    assert found == pytest.approx([*known.values()], abs=4)


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_kept_memory_is_taken_again_without_page_faults():
    code = (
        "import torch; from benchmarks import allocator, timing; allocator.keep_memory()\n"
        "def call(size): return torch.empty(size, dtype=torch.uint8).fill_(1)\n"
        "for size in (17_000_000, 262_000_000):\n"
        "    timings = timing.interleave({'a': call, 'b': call}, [size], 3, settle=True)\n"
        "print(max(t.median_faults for t in timings.values()))"
    )
    assert printed_by(code) < 8
