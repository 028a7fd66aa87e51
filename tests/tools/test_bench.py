"""The benchmark checks results before it times them, and its tables have the measured numbers."""

import json
from types import SimpleNamespace

import pytest
from small_cases import small

from benchmarks import candidates, linear
from benchmarks.__main__ import main
from benchmarks.candidates import WrongResult, check_outputs, named_outputs, tolerances, truth
from benchmarks.cases import DTYPES, Case, make_inputs
from benchmarks.measure import check_candidates, is_noisy_row, rows_of
from benchmarks.suites import OPS, SUITES
from benchmarks.timing import Timing

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["--quick", "--no-compile", "--rounds", "1"]
BESIDE = {
    "logprob": ["selective"],
    "topk": ["verl"],
    "linear": ["held logits", "checkpoint"],
    "step": ["held logits"],
}
"""An op's first word -> its other baselines."""


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
        beside = 3 * of_entries * OPS[op].reads  # per row
        assert Case(OPS[op], dtype, (3, 5)).least_bytes == per_number * 15 + beside


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_candidate_is_right_and_one_wrong_number_is_found(monkeypatch, op, dtype):
    """Results are compared in blocks of two rows."""
    monkeypatch.setitem(candidates._NUMBERS_PER_BLOCK, "cpu", 260)
    monkeypatch.setattr(linear, "_ROWS", 2)
    inputs = make_inputs(small(op, dtype), 1)[0]
    names = ["klfast", "eager", *BESIDE.get(op.name.partition("-")[0], [])]
    names += [*linear.torchs()] * (op.name == "linear-logprob")
    built = candidates.build_candidates(op, with_compile=False)
    assert list(check_candidates(built, op, inputs)) == names
    expected = truth(op, inputs)
    allowed = tolerances(op, inputs, expected)
    right = built["eager"](inputs)
    for name in named_outputs(op, right):
        assert dtype == "bf16" or allowed[name] < 0.2 * expected[name].abs().max() + 0.01
        wrong = expected[name].clone()
        wrong.view(-1)[-1] += 3 * allowed[name]
        with pytest.raises(WrongResult, match=f"eager computes a wrong {name}"):
            check_outputs("eager", op, right, {**expected, name: wrong}, allowed)


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


@pytest.mark.parametrize(
    "suite",
    [pytest.param(s, marks=[] if s == "tokens" else pytest.mark.exhaustive) for s in SUITES],
)
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, suite):
    out, ops = tmp_path / "bench.json", SUITES[suite].ops
    options = ["--suite", suite, "--dtypes", "fp32", "--out", str(out)]
    assert main([*QUICK, "--allow-load", *options]) == 0
    printed = capsys.readouterr().out
    assert SUITES[suite].text in printed
    assert " vs eager " not in printed  # too few rounds
    data = json.loads(out.read_text())
    assert data["finished"]
    assert data["conditions"]["quick"] is data["conditions"]["load_allowed"] is True
    for name in ops:
        rows = {row["impl"]: row for row in data["rows"] if row["op"] == name}
        assert {"klfast", "eager"} <= set(rows)
        assert all(0 < row["min_ms"] <= row["median_ms"] for row in rows.values())
        assert rows["klfast"]["ratio"] == 1
