"""Every table that tests and hints read has a row for each public function over tensors."""

import inspect

import pytest
from eager_divergences import EAGER
from every_function import every_function
from families import VARIANTS

import klfast
from klfast.args.signature import SIGNATURES
from klfast.cli.check.cases import FAMILIES
from klfast.functional.hints import _HINTS
from klfast.types.names import DIRECTIONS

OVER_TOKENS = {
    name
    for name in klfast.__all__
    if inspect.isfunction(of := getattr(klfast, name))
    and "mask" in inspect.signature(of).parameters
}
ABOUT_TOKENS = {"data_parallel_normalizer", "log_ratio_profile", "worst_tokens"}
"""Functions without a gradient or a backend of their own. Their tests are files of their own."""


@pytest.mark.parametrize(
    ("rows", "without"),
    {
        "SIGNATURES": (SIGNATURES, {"log_ratio_profile"}),
        "FAMILIES": ([of.function for of in FAMILIES.values()], {*ABOUT_TOKENS, "reduce"}),
        "every_function": ([name.partition("(")[0] for name in every_function()], {"worst_tokens"}),
        "_HINTS": (_HINTS, {*ABOUT_TOKENS, "linear_token_logprobs", "linear_token_loss"}),
    }.values(),
    ids=["SIGNATURES", "FAMILIES", "every_function", "_HINTS"],
)
def test_rows_are_the_public_functions(rows, without):
    assert OVER_TOKENS - {*rows} == without
    assert {*rows} <= {*klfast.__all__}


def test_rows_are_the_directions():
    assert [*EAGER] == [*DIRECTIONS]


def test_variants_are_of_every_family():
    assert VARIANTS.keys() == FAMILIES.keys()
