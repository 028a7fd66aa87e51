"""The benchmark: nothing wrong is timed, nothing flatters, and its output says what it is."""

import dataclasses
import json
import re

import pytest
import torch
from small_cases import small
from torch import Tensor

import klfast
from benchmarks import candidates, check, command, linear, measure, outcome, tokens
from benchmarks.__main__ import main
from benchmarks.cases import DTYPES, Case, make_inputs
from benchmarks.check import WrongResult, check_outputs, named_outputs, tolerances, truth
from benchmarks.kl_step import time_kl_step
from benchmarks.measure import Plan, checked_candidates, rows_of
from benchmarks.outcome import print_results
from benchmarks.suites import OPS, SUITES
from benchmarks.timing import Timing, interleave

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ["--quick", "--no-compile", "--rounds", "2", "--allow-load"]
SMALL_SHAPE = dict.fromkeys(SUITES, "16x256") | {"linear": "16x8x256"}
LARGE_SHAPE = {"tokens": "64x4096", "options": "64x4096", "logits": "9x70000", "topk": "9x70000"}
LARGE_SHAPE["linear"] = "9x16x70000"
"""Whose inputs are read in more than the time of a call."""
OTHERS = {"logprob": ["selective"], "topk": ["verl"], "linear": ["held logits", "checkpoint"]}
"""An op's first word -> its other rivals."""
TORCHS = [*linear.torchs()]
RIVALS = {name for names in (*OTHERS.values(), TORCHS) for name in names}
ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
suites = pytest.mark.parametrize("suite", SUITES)


@pytest.mark.parametrize(
    ("op", "fp32", "bf16"),
    [
        ("forward", 9, 5),
        ("stats", 9, 5),
        ("one-read", 13, 7),
        ("two-pass", 22, 12),
        ("limits", 9, 5),
        ("weights", 13, 7),
        ("limits-one-read", 13, 7),
        ("weights-one-read", 17, 9),
        ("k2-one-read", 13, 7),
        ("sum-one-read", 13, 7),
        ("kl", 8, 4),
        ("kl-one-read", 12, 6),
        ("kl-two-pass", 20, 10),
        ("jsd-one-read", 12, 6),
        ("logprob", 4, 2),
        ("logprob-entropy", 4, 2),
        ("logprob-two-pass", 12, 6),
        ("topk", 4, 2),
        ("topk-loss", 12, 6),
        ("topk-drop-loss", 12, 6),
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
    assert case.numbers == 15


@ops
@dtypes
def test_every_candidate_is_right(op, dtype):
    inputs = make_inputs(small(op, dtype), 1)[0]
    names = ["klfast", "eager", *OTHERS.get(op.name.partition("-")[0], [])]
    names += TORCHS * (op.name == "linear-logprob")
    assert list(checked_candidates(op, inputs, with_compile=False)) == names


@ops
@pytest.mark.parametrize("numbers", [1, 260])
def test_the_truth_is_the_same_in_blocks_of_rows(monkeypatch, op, numbers):
    inputs = make_inputs(small(op), 1)[0]
    whole = truth(op, inputs)
    monkeypatch.setitem(check._NUMBERS_PER_BLOCK, "cpu", numbers)
    monkeypatch.setattr(linear, "_ROWS", 1)
    for name, value in truth(op, inputs).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("op", ["two-pass", "kl-two-pass", "logprob-two-pass", "topk-loss"])
@pytest.mark.parametrize("row", range(6))
def test_one_wrong_number_of_a_gradient_is_found_in_any_block(monkeypatch, op, row):
    monkeypatch.setitem(check._NUMBERS_PER_BLOCK, "cpu", 260)
    op = OPS[op]
    inputs = make_inputs(small(op), 1)[0]
    expected = truth(op, inputs)
    allowed = tolerances(op, inputs, expected)
    value, gradient = candidates.build_candidates(op, with_compile=False)["klfast"](inputs)
    gradient[row, -1] += 3 * allowed["gradient"]
    with pytest.raises(WrongResult, match="klfast computes a wrong gradient"):
        check_outputs("klfast", op, (value, gradient), expected, allowed)


@pytest.mark.parametrize("op", ["forward", "one-read", "kl", "kl-one-read", "jsd-one-read"])
@pytest.mark.parametrize("spread", [0, 1e-6, 1e-3, 5])
def test_eager_rounding_near_on_policy_is_not_called_wrong(op, spread):
    op = OPS[op]
    inputs = make_inputs(small(op), 1)[0]
    policy, reference = inputs.arguments[:2]
    torch.add(policy.detach(), torch.randn(6, 130), alpha=spread, out=reference)
    assert checked_candidates(op, inputs, with_compile=False)


@ops
@dtypes
def test_a_wrong_result_is_an_error(op, dtype):
    inputs = make_inputs(small(op, dtype), 1)[0]
    expected = truth(op, inputs)
    allowed = tolerances(op, inputs, expected)
    right = candidates.build_candidates(op, with_compile=False)["eager"](inputs)
    check_outputs("eager", op, right, expected, allowed)
    for name in named_outputs(op, right):
        off = max(0.03 * expected[name].abs().max() + 1e-3, 2 * allowed[name])
        wrong = {**expected, name: expected[name] * 1.03 + off}
        with pytest.raises(WrongResult, match=f"eager computes a wrong {name}"):
            check_outputs("eager", op, right, wrong, allowed)


def test_a_mask_that_is_ignored_is_an_error(monkeypatch):
    inputs = make_inputs(Case(OPS["forward"], "fp32", (6, 130)), 1)[0]
    monkeypatch.setitem(tokens.SUMS, "seq-sum", lambda masked, mask: (masked + ~mask).sum(-1))
    with pytest.raises(WrongResult, match="eager computes a wrong penalty"):
        checked_candidates(OPS["forward"], inputs, with_compile=False)


def test_rounds_alternate_and_inputs_rotate():
    seen = []

    def called(name):
        return lambda inputs: seen.append((name, inputs)) or sum(range(400_000))

    timings = interleave({"a": called("a"), "b": called("b"), "c": called("c")}, [0, 1], 3)
    assert [inputs for _, inputs in seen] == [n % 2 for n in range(len(seen))]
    assert [name for name, _ in seen[-9:]] == [*"abc", *"cba", *"abc"]
    assert len(seen) == 3 * 2 + 9  # two calls of each, untimed, come first
    assert all(len(timing.seconds) == 3 and timing.calls == 1 for timing in timings.values())


def test_reused_inputs_are_warmed_before_every_timing():
    seen = []
    slow = {"a": lambda inputs: seen.append(1) or sum(range(400_000))}
    interleave(slow, [0], 3, warm=True)
    assert len(seen) == 2 + 2 * 3


def test_ratio_speed_and_share_are_of_medians():
    case = Case(OPS["one-read"], "fp32", (1000, 1000))
    seconds = {
        "klfast": [2e-3, 1e-3, 9e-3],
        "eager": [8e-3] * 3,
        "read": [1e-3] * 3,
        "read + fill": [1.6e-3] * 3,
    }
    ours, eager, read, floor = rows_of(case, {name: Timing(s, 1) for name, s in seconds.items()})
    assert (ours.median_ms, ours.min_ms, ours.ratio) == pytest.approx((2, 1, 1))
    assert eager.ratio == pytest.approx(4)
    assert read.ratio is floor.ratio is None
    assert (ours.bytes, read.bytes, floor.bytes) == (13_000_000, 9_000_000, 13_000_000)
    assert (ours.floor_ratio, eager.floor_ratio) == pytest.approx((1.25, 5))
    assert ours.gb_per_s == pytest.approx(6.5)
    assert ours.read_share == pytest.approx(6.5 / 9)
    assert read.read_share == floor.floor_ratio == 1


def test_without_a_gradient_the_floor_is_the_read_and_without_a_read_there_is_none():
    case = Case(OPS["forward"], "fp32", (1000, 1000))
    timings = {"klfast": Timing([3e-3], 1, [7.0]), "read": Timing([2e-3], 1)}
    ours, read = rows_of(case, timings)
    assert (ours.floor_ratio, read.floor_ratio) == (1.5, 1)
    assert (ours.page_faults, read.page_faults) == (7.0, None)
    (alone,) = rows_of(case, {"klfast": timings["klfast"]})
    assert alone.floor_ratio is alone.read_share is None


BESIDE = {
    "stats": "plain k3",
    "limits": "plain k3",
    "weights": "plain k3",
    "limits-one-read": "plain k3",
    "weights-one-read": "plain k3",
    "k2-one-read": "plain k3",
    "sum-one-read": "token-mean",
    "logprob-two-pass": "klfast in place",
    "topk": "token_logprobs",
    "topk-loss": "token_logprobs",
    "topk-drop-loss": "token_logprobs",
}
"""Op -> what is timed beside it."""


def plainly(name, op):
    """The function that computes the same as what is timed beside an op."""
    if name == "token_logprobs":
        means = {True: Tensor.mean, False: lambda logprobs: logprobs}
        return lambda logits, ids, _: means[op.backward](klfast.token_logprobs(logits, ids[:, 0]))
    plain = {"klfast in place": "logprob-two-pass", "token-mean": "one-read"}
    call = OPS[plain.get(name, "forward")].klfast()
    return (lambda *x: call(*x).sum()) if name == "plain k3" and op.backward else call


@ops
@dtypes
def test_what_is_timed_beside_an_op_computes_what_it_says(op, dtype):
    inputs = make_inputs(small(op, dtype), 1)[0]
    first = inputs.arguments[0].detach().clone()
    beside = op.beside(inputs)
    assert set(beside) == {BESIDE[op.name]} if op.name in BESIDE else not beside
    for name, call in beside.items():
        x, *others = (tensor.detach() for tensor in inputs.arguments[:3])
        x = x.requires_grad_(op.backward)
        value = plainly(name, op)(x, *others)
        result = call(inputs)
        if op.backward:
            result, gradient = result
            expected = torch.autograd.grad(value, x, inputs.grad_out)[0]
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(result, value)
        call(inputs)
    assert torch.equal(inputs.arguments[0], first)


@suites
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, suite):
    out = tmp_path / "bench.json"
    shapes = [SMALL_SHAPE[suite], LARGE_SHAPE[suite]]
    options = ["--suite", suite, "--shapes", ",".join(shapes), "--out", str(out)]
    assert main([*QUICK, *options]) == 0
    printed = capsys.readouterr()
    data = json.loads(out.read_text())
    assert data["finished"]
    ops = SUITES[suite].ops
    names = [f"{op} {dtype} {shape}" for shape in shapes for op in ops for dtype in DTYPES]
    assert list(dict.fromkeys(row["case"] for row in data["rows"])) == names
    for name in names:
        assert name in printed.out
        assert name in printed.err
        rows = {row["impl"]: row for row in data["rows"] if row["case"] == name}
        op = OPS[rows["klfast"]["op"]]
        others = {"read", "read + fill", "products", BESIDE.get(op.name), *RIVALS}
        assert set(rows) - others == {"klfast", "eager"}
        assert (BESIDE.get(op.name) in rows) == (op.name in BESIDE)
        is_large, of_products = name.endswith(shapes[1]), suite == "linear"
        assert (name in data["probes"]) == is_large
        assert ("read" in rows) == (is_large and not of_products)
        assert ("read + fill" in rows) == (op.backward and is_large and not of_products)
        assert ("products" in rows) == (is_large and of_products)
        assert all(0 < row["min_ms"] <= row["median_ms"] for row in rows.values())
        assert (rows["klfast"]["gb_per_s"] is None) == ("read" not in rows)
    where = data["conditions"]
    assert set(where["versions"]) == {"klfast", "torch", "python"}
    assert where["versions"]["torch"] == torch.__version__
    assert where["threads"] == torch.get_num_threads()
    assert (where["suite"], where["rounds"], where["inputs"]) == (suite, 2, "rotated")
    assert where["memory"] == "left to malloc, which gives large blocks back to the system"
    assert where["load_allowed"] is True
    assert set(data["loads"]) == set(names)
    assert {
        "others_share",
        "device",
        "date",
        "commit",
        "instruction_set",
        *SUITES[suite].facts,
    } <= set(where)
    assert SUITES[suite].text in printed.out


def test_the_floor_of_hidden_states_is_the_fastest_bare_products(monkeypatch):
    case = small(OPS["linear-kl-loss"])
    inputs = make_inputs(case, 1)[0]
    hidden, weight, ref_hidden, ref_weight = (tensor.detach() for tensor in inputs.arguments)
    monkeypatch.setattr(linear, "chunk_of", lambda arguments: 4)
    logits = hidden @ weight.t()
    expected = [logits, ref_hidden @ ref_weight.t(), logits @ weight, logits.t() @ hidden]
    whole, in_parts = case.op.floors().values()
    for found, want in zip(whole(inputs), expected, strict=True):
        torch.testing.assert_close(found, want)
    for found, want in zip(in_parts(inputs), expected[2:], strict=True):
        torch.testing.assert_close(found, want)
    seconds = {"klfast": [3.0], "eager": [8.0], "products": [2.0]}
    rows = rows_of(case, {name: Timing(s, 1) for name, s in seconds.items()})
    assert [row.floor_ratio for row in rows] == [1.5, 4.0, 1.0]
    assert [row.ratio for row in rows] == pytest.approx([1, 8 / 3, 2 / 3])


@pytest.mark.parametrize("op", linear.OPS)
@pytest.mark.parametrize("place", [0, 1])
def test_one_wrong_number_of_a_gradient_from_hidden_states_is_found(op, place):
    op = OPS[op]
    inputs = make_inputs(small(op), 1)[0]
    expected = truth(op, inputs)
    allowed = tolerances(op, inputs, expected)
    result, *gradients = candidates.build_candidates(op, with_compile=False)["klfast"](inputs)
    check_outputs("klfast", op, (result, *gradients), expected, allowed)
    place = min(place, len(gradients) - 1)
    name = [*op.gradients][place]
    assert allowed[name] < 0.2 * expected[name].abs().max()
    gradients[place][2, 3] += 3 * allowed[name]
    with pytest.raises(WrongResult, match=f"klfast computes a wrong {name}"):
        check_outputs("klfast", op, (result, *gradients), expected, allowed)


def row_of(median, least, impl="klfast"):
    case = Case(OPS["forward"], "fp32", (4, 8))
    (row,) = rows_of(case, {"klfast": Timing([least, median, median], 1)})
    return dataclasses.replace(row, impl=impl)


@pytest.mark.parametrize(("median", "noisy"), [(1.0, False), (1.99, False), (2.0, True), (9, True)])
def test_a_median_of_twice_the_minimum_is_flagged(capsys, median, noisy):
    results = outcome.Results(rows=[row_of(median, 1.0), row_of(1.0, 1.0, "eager")])
    results.loads = {results.rows[0].case: None}
    where = {**outcome.conditions(Plan()), "quick": False}
    print_results(results, {**where, "others_share": None}, SUITES["tokens"], "cpu")
    heading, ours, eager, *below = capsys.readouterr().out.splitlines()
    assert heading.endswith("flags")
    assert ours.endswith("noisy") == noisy
    assert not eager.endswith("noisy")
    said = "noisy: in 1 of 2 rows the median is 2 times the minimum or more. Measure these again."
    assert (said in below) == noisy


@suites
def test_quick_prints_no_ratios_and_says_so(capsys, tmp_path, suite):
    out = tmp_path / "bench.json"
    op = next(iter(SUITES[suite].ops))
    arguments = ["--suite", suite, "--ops", op, "--dtypes", "fp32", "--shapes", LARGE_SHAPE[suite]]
    assert main([*QUICK, *arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert any(line.startswith("--quick shows that it works: its rounds are") for line in lines)
    assert not re.search("ratio|of read|of floor", lines[0])
    rows = [line for line in lines if f" {LARGE_SHAPE[suite]} " in line or line.startswith("  ")]
    assert len(rows) > 2
    assert not any(re.search(r"\dx( |$)|%", line) for line in rows)
    assert "ratio:" not in printed
    assert json.loads(out.read_text())["conditions"]["quick"] is True


def test_a_file_of_an_earlier_run_is_refused_before_anything_is_measured(tmp_path, capsys):
    out = tmp_path / "bench.json"
    out.write_text("an earlier run's")
    assert main([*QUICK, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"python -m benchmarks: error: {out} is there already: replace it (--force), or name "
        "another file\n"
    )
    assert out.read_text() == "an earlier run's"
    only = ["--ops", "forward", "--dtypes", "fp32"]
    assert main([*QUICK, *only, "--out", str(out), "--force"]) == 0
    assert json.loads(out.read_text())["finished"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "512"], "a shape must be rows x columns, such as 512x8192, got '512'"),
        (["--shapes", "0x4"], "got '0x4'"),
        (["--shapes", ""], "got ''"),
        (["--dtypes", "fp32,fp8"], "expected some of 'fp32', 'bf16', got 'fp8'"),
        (["--suite", "words"], "invalid choice: 'words'"),
        (["--rounds", "0"], "must be a whole number >= 1, got '0'"),
        (["--rounds", "many"], "must be a whole number >= 1, got 'many'"),
    ],
)
def test_a_mistake_is_a_clear_error_of_usage(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments])
    assert message in capsys.readouterr().err


def test_a_wrong_candidate_ends_the_command(monkeypatch, capsys):
    monkeypatch.setitem(tokens.SUMS, "token-mean", lambda masked, mask: masked.sum())
    assert main([*QUICK, "--ops", "one-read"]) == 1
    printed = capsys.readouterr()
    assert "python -m benchmarks: error: eager computes a wrong penalty (one-read)" in printed.err
    assert printed.out == ""


def test_a_case_without_memory_is_left_out_visibly(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "available_memory", lambda: 3 << 29)
    out = tmp_path / "bench.json"
    shapes = ["--shapes", "65536x65536,16x256", "--ops", "forward", "--dtypes", "fp32"]
    assert main([*QUICK, *shapes, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "left out: forward fp32 65536x65536: needs" in printed
    data = json.loads(out.read_text())
    assert list(data["skipped"]) == ["forward fp32 65536x65536"]
    assert {row["case"] for row in data["rows"]} == {"forward fp32 16x256"}


def test_ctrl_c_keeps_what_was_measured(monkeypatch, tmp_path, capsys):
    def measured(case, plan):
        if case.dtype == "bf16":
            raise KeyboardInterrupt
        return measure.measure(case, plan)

    monkeypatch.setattr(command, "measure", measured)
    out = tmp_path / "bench.json"
    assert main([*QUICK, "--ops", "forward", "--out", str(out)]) == 130
    data = json.loads(out.read_text())
    assert not data["finished"]
    assert {row["case"] for row in data["rows"]} == {"forward fp32 16x256"}
    assert "Interrupted" in capsys.readouterr().out


def test_a_compiler_that_fails_is_left_out_with_the_reason(monkeypatch, tmp_path):
    def broken(op):
        def forward(*tensors):
            raise RuntimeError("no C++ compiler\nand a long trace")

        return forward

    monkeypatch.setattr(candidates, "compiled_forward", broken)
    out = tmp_path / "bench.json"
    arguments = ["--quick", "--ops", "forward", "--dtypes", "fp32", "--allow-load"]
    assert main([*arguments, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert {row["impl"] for row in data["rows"]} == {"klfast", "eager"}
    assert data["notes"] == [
        "forward fp32 16x256: torch.compile is left out, as it fails here: "
        "RuntimeError: no C++ compiler"
    ]


def test_the_kl_step_is_timed_on_the_runs_shape_and_on_a_large_one():
    rows = time_kl_step((6, 20), large=(8, 64))
    cases = [
        "forward [6, 20] of this run",
        "forward+backward [6, 20] of this run",
        "forward [8, 64]",
        "forward+backward [8, 64]",
    ]
    assert [(row["case"], row["impl"]) for row in rows] == [
        (case, impl) for case in cases for impl in ("klfast", "eager")
    ]
    for row in rows:
        ours = next(r for r in rows if (r["case"], r["impl"]) == (row["case"], "klfast"))
        assert set(row) == {"case", "impl", "median_ms", "min_ms", "ratio", "busy"}
        assert row["busy"] is ours["busy"]
        assert 0 < row["min_ms"] <= row["median_ms"]
        assert row["ratio"] == pytest.approx(row["median_ms"] / ours["median_ms"])
