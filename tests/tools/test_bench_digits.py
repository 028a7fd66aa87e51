"""The errors of a KL from hidden states: of functions whose errors are known, and their table."""

import json
import sys

import pytest
import torch

from benchmarks import digits

pytestmark = pytest.mark.usefixtures("one_thread")
OURS = "klfast `linear_kl_divergence`"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The file of a toy size, with one function of a framework that is not here."""
    folder = tmp_path_factory.mktemp("results")
    wrong = {"made-up, off by a tenth": lambda m: digits.Found(1.1 * digits.truth_of(m).kl)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(digits.WAYS_OF, "trl", lambda: wrong)
        patched.setattr(sys, "argv", ["digits.py", "trl", "--quick", "--out", str(folder)])
        assert digits.main() == 0
    return json.loads((folder / "digits-trl.json").read_text())


def rows_of(results, function):
    return [row for row in results["rows"] if row["function"] == function]


def test_the_models_are_as_far_apart_as_they_say(results):
    for row in rows_of(results, OURS):
        assert row["kl"] == pytest.approx(row["about"], rel=0.9)


def test_a_known_error_is_found(results):
    for row in rows_of(results, "made-up, off by a tenth"):
        assert (row["mean"], row["worst"]) == (pytest.approx(0.1), pytest.approx(0.1))


def test_rounded_logits_are_far_off_and_klfast_is_not(results):
    first, *_ = rows_of(results, OURS)
    rounded, *_ = rows_of(results, "klfast `kl_divergence` of bf16 logits")
    assert abs(first["mean"]) < 1e-3 < 0.5 < abs(rounded["mean"])


def test_errors_of_log_probs_are_in_nats():
    truth = digits.Truth(torch.ones(2), *torch.tensor([[-1.0, -2.0], [-1.5, -2.5]]).double())
    found = digits.Found(logprobs=(truth.logprobs + 0.25, truth.ref_logprobs + 0.25))
    row = digits.errors(found, truth)
    assert (row["kind"], row["logprob"]) == (digits.K3, 0.25)
    assert row["mean"] == pytest.approx(0)  # the log-ratios are the same


def test_a_line_has_a_function_and_a_column_each_distance(results):
    table, conditions = digits.table_of([results, results]).split("\n\n")
    heading, _, *lines = table.splitlines()
    assert heading.count(" nats |") == len(digits.DISTANCES)
    assert len(lines) == len({row["function"] for row in results["rows"]})
    assert sum("| 0.1 (0.1) |" in line for line in lines) == 1
    assert "8 tokens of two models" in conditions


@pytest.mark.parametrize(
    ("value", "text"),
    [(6.5e-7, "6.5e-7"), (0.0035, "0.0035"), (32.7, "33"), (46952.9, "47,000"), (0.0, "0")],
)
def test_errors_have_two_digits(value, text):
    assert digits.short(value) == text
