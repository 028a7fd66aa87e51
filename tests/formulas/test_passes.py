"""``csrc/formulas/passes.h`` decides when a row of logits is summed again. It is compiled alone."""

import pytest

STEPS = ("find-first", "sum-first", "find-in-row", "sum-from-row", "sum-again", "done")
VERDICTS = ("useless", "poor", "good")
OVER_THE_ROW = {"sum-first", "find-in-row", "sum-from-row", "sum-again"}

VERDICTS_ON_ONE = {
    "nan": "useless",
    "inf": "useless",
    "0": "useless",
    "1e-20": "useless",
    "1.1e-20": "poor",
    "1e-2": "poor",
    "1.1e-2": "good",
    "1": "good",
    "9.9e6": "good",
    "1e7": "poor",
    "9.9e29": "poor",
    "1e30": "useless",
}
"""The sum of e^(x - m) of a row -> the verdict."""

VERDICTS_ON_TWO = {
    "1,1,0": "good",
    "1,1,1": "poor",
    "1,0.125,0": "poor",
    "1,0.126,0": "good",
    "1,9.9e3,0": "good",
    "1,1e4,0": "poor",
    "1e8,1,0": "poor",
    "1e8,1e8,0": "poor",
    "100,10,0": "poor",
    "100,100,0": "good",
    "1e20,1e29,0": "poor",
    "1e20,8.5e37,0": "useless",  # 2**126, which is exp's limit on some instruction sets
    "1e20,1.7e38,0": "useless",  # e**88
    "1e-15,1e-21,0": "useless",
    "1,1e-20,0": "useless",
    "1,1e30,0": "useless",
    "1,nan,0": "useless",
    "nan,1,0": "useless",
    "1e-20,1,1": "useless",
}
"""The sums of two models, and 1 if their KL has lost digits -> the verdict."""


@pytest.fixture(scope="module")
def program(compiled):
    return compiled("passes")


@pytest.fixture(scope="module")
def next_step(program):
    """(step, verdict) -> the next step."""
    rules = [line.split() for line in program()[: len(STEPS) * len(VERDICTS)]]
    table = {(step, verdict): after for step, verdict, after in rules}
    assert set(table) == {(step, verdict) for step in STEPS for verdict in VERDICTS}
    return table


@pytest.fixture(scope="module")
def roads(next_step):
    """Every sequence of (step, verdict) pairs that a row may have."""

    def follow(step, road):
        assert len(road) < 10, f"a road without end: {road}"
        if step == "done":
            yield road
            return
        for verdict in VERDICTS:
            yield from follow(next_step[step, verdict], [*road, (step, verdict)])

    return list(follow("find-first", []))


def test_a_row_takes_one_pass_if_its_first_guess_is_good(next_step):
    assert next_step["find-first", "good"] == "sum-first"
    assert next_step["sum-first", "good"] == "done"


def test_a_row_takes_at_most_four_passes(roads):
    passes = [sum(step in OVER_THE_ROW for step, _ in road) for road in roads]
    assert max(passes) == 4


@pytest.mark.parametrize("cases", [VERDICTS_ON_ONE, VERDICTS_ON_TWO], ids=["one", "two"])
def test_verdicts(program, cases):
    verdicts = program(*cases)[len(STEPS) * len(VERDICTS) :]
    assert dict(zip(cases, verdicts, strict=True)) == cases
