"""What ``make test-break`` counts with: it fails where it must, and samples alike in every run."""

import math
import runpy
from pathlib import Path

import pytest
import torch

MODULE = runpy.run_path(str(Path(__file__).parents[1] / "break" / "hunt.py"))
Hunt = MODULE["Hunt"]


def fail(error):
    raise error


WRONG = {
    "equal": lambda hunt: hunt.equal(1, 2),
    "bits": lambda hunt: hunt.bits(torch.ones(2), torch.tensor([1.0, 1 + 1e-7])),
    "close": lambda hunt: hunt.close(torch.ones(2), torch.tensor([1.0, 1.1]), 0.01),
    "accepted": lambda hunt: hunt.refuses(lambda: 0, "mask"),
    "silent": lambda hunt: hunt.raises(lambda: 0),
}
RIGHT = {
    "check": lambda hunt: hunt.check(True),
    "equal": lambda hunt: hunt.equal([1], [1]),
    "bits": lambda hunt: hunt.bits(torch.tensor([math.nan, 1]), torch.tensor([math.nan, 1])),
    "close": lambda hunt: hunt.close(torch.ones(2), torch.tensor([1.0, 1.1]), 0.11),
    "close-nan": lambda hunt: hunt.close(torch.tensor(math.nan), torch.tensor(math.nan), 0.0),
    "overflow": lambda hunt: hunt.close(
        torch.tensor(math.inf), torch.tensor(1e39, dtype=torch.float64), 0.0
    ),
    "refused": lambda hunt: hunt.refuses(lambda: fail(TypeError("mask must be")), ("a", "mask")),
    "raised": lambda hunt: hunt.raises(lambda: fail(RuntimeError("freed"))),
}


@pytest.mark.parametrize("check", WRONG.values(), ids=WRONG)
def test_what_is_wrong_fails_at_the_end_and_names_its_case(check):
    hunt = Hunt(0, whole=True)
    check(hunt)
    hunt.check(True)
    with pytest.raises(AssertionError, match="1 of 2 checks failed"):
        hunt.conclude()


@pytest.mark.parametrize("check", RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_counted(check):
    hunt = Hunt(0, whole=True)
    check(hunt)
    hunt.conclude()
    assert hunt.checks == 1


def test_a_short_run_tries_the_same_sample_every_time():
    assert Hunt(7, whole=True).some(range(100)) == list(range(100))
    sample = Hunt(7, whole=False).some(range(100))
    assert len(sample) == 10
    assert sample == Hunt(7, whole=False).some(range(100))
    assert sample != Hunt(8, whole=False).some(range(100))
    assert Hunt(7, whole=False).some("a") == ["a"]


def test_bad_inputs_are_checks_and_counted_beside_them():
    hunt = Hunt(0, whole=True)
    hunt.refuses(lambda: fail(ValueError("mask")), "mask")
    hunt.check(True)
    assert (hunt.checks, hunt.bad_inputs) == (2, 1)
    assert MODULE["totals"]({"a": [2, 1], "b": [3, 0]}) == [5, 1]
