"""The tables of the recorded studies: their arithmetic, and what the results must say."""

import json

import pytest

from benchmarks import studies
from benchmarks.candidates import KLFAST
from benchmarks.cases import EAGER
from benchmarks.outcome import RESULTS

KNOWN = {EAGER: (24.0, 6.0, 2.0, 0.0), KLFAST: (0.0, 6.0, 6.0, 8.0)}


@pytest.mark.parametrize("way", KNOWN)
def test_the_longest_batch_fits_and_one_token_more_does_not(way):
    fitted = studies.Fit(way, *KNOWN[way])
    width, words = studies.MODELS[studies.CHECKED]
    tokens = fitted.longest(width, words, studies.GIVEN)

    def taken(tokens):
        return fitted.bytes_of((tokens, width, words)) + 2 * tokens * width * studies.BYTES

    assert taken(tokens) <= studies.GIVEN < taken(tokens + 1)
    assert fitted.longest(width, words, 1 << 20) == 0  # which the head's gradient fills


def test_what_was_measured_is_what_was_expected():
    """At the size of a model that nothing was fitted to."""
    data = json.loads((RESULTS / "longest.json").read_text())
    for row in data["ways"]:
        expected = studies.Fit(**row["fit"]).bytes_of(row["check"]["shape"])
        assert row["check"]["peak"] == pytest.approx(expected, rel=0.1), row["way"]


@pytest.mark.parametrize(
    ("tokens", "text"), [(0, "0"), (7, "7"), (1999, "1,900"), (123_456, "120,000")]
)
def test_tokens_are_rounded_down(tokens, text):
    assert studies.rounded(tokens) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(6.5e-7, "6.5e-7"), (0.0035, "0.0035"), (32.7, "33"), (46952.9, "47,000"), (0.0, "0")],
)
def test_errors_have_two_digits(value, text):
    assert studies.short(value) == text
