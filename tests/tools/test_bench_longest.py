"""The longest batch in a memory: what is fitted to known bytes, its arithmetic, and the tables."""

import json
from pathlib import Path

import pytest

from benchmarks import longest, memory
from benchmarks.candidates import KLFAST
from benchmarks.cases import EAGER
from benchmarks.linear import HELD

KNOWN = {EAGER: (24.0, 6.0, 2.0, 0.0), KLFAST: (0.0, 6.0, 6.0, 8.0)}
MODEL = longest.MODELS[0]
RESULTS = Path(longest.FILE)


def peak_of(way, shape):
    return sum(
        size * each for size, each in zip(longest.sizes_of(way, shape), KNOWN[way], strict=True)
    )


@pytest.fixture
def data(monkeypatch):
    """Results of two ways whose bytes are known."""
    monkeypatch.setattr(memory, "peak_bytes", lambda case, way: round(peak_of(way, case.shape)))
    where = {"date": "2000-01-01", "device": "made up", "versions": {"klfast": "0"}, "commit": "0"}
    return {"conditions": where, "ways": [longest.measure(way) for way in KNOWN]}


def test_known_bytes_are_found(data):
    for row in data["ways"]:
        found = list(row["fit"].values())
        assert found[0] == row["way"]
        assert found[1:] == pytest.approx(KNOWN[row["way"]], abs=1e-3)
        assert row["check"]["peak"] == pytest.approx(row["check"]["expected"], rel=1e-4)


@pytest.mark.parametrize("way", KNOWN)
def test_the_longest_batch_fits_and_one_token_more_does_not(way):
    fitted = longest.Fit(way, *KNOWN[way])
    tokens = fitted.longest(MODEL.width, MODEL.words, longest.GIVEN)

    def taken(tokens):
        hidden = 2 * tokens * MODEL.width * longest.BYTES
        return peak_of(way, (tokens, MODEL.width, MODEL.words)) + hidden

    assert taken(tokens) <= longest.GIVEN < taken(tokens + 1)
    assert fitted.longest(MODEL.width, MODEL.words, 1 << 20) == 0  # which the head's gradient fills


def test_a_run_to_compare_has_as_many_tokens_as_fit_or_as_take_a_while(data):
    eager, klfast = (row["check"] for row in data["ways"])
    assert eager["shape"][0] == eager["fits"] < longest.CHECK_TOKENS
    assert klfast["shape"][0] == longest.CHECK_TOKENS < klfast["fits"]


def test_the_tables_have_every_model_and_way(data):
    longest_table, bytes_table, conditions = longest.tables_of(data).split("\n\n")
    heading, _, *lines = longest_table.splitlines()
    assert heading.endswith("| eager | klfast |")
    assert [line.split("`")[1] for line in lines] == [model.name for model in longest.MODELS]
    assert "| eager | 24.0 V + 10.0 D | 2.0 D V |" in bytes_table
    assert "| klfast | 10.0 D | 6.0 D V + 0.1 GiB |" in bytes_table
    assert "made up" in conditions


@pytest.mark.parametrize(
    ("tokens", "text"), [(0, "0"), (7, "7"), (1999, "1,900"), (123_456, "120,000")]
)
def test_tokens_are_rounded_down(tokens, text):
    assert longest.rounded(tokens) == text


def test_what_was_measured_is_what_was_expected():
    """Of the published results, at the size of a model that nothing was fitted to."""
    data = json.loads(RESULTS.read_text())
    assert {row["way"] for row in data["ways"]} == set(longest.WAYS)
    for row in data["ways"]:
        assert row["check"]["peak"] == pytest.approx(row["check"]["expected"], rel=0.1), row["way"]
    assert {row["way"] for row in data["ways"] if row["way"] in longest.HOLDING} == {EAGER, HELD}
