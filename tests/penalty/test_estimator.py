"""Estimator as a value: it is compared, copied, and checks its settings. Names of choices."""

import copy
import dataclasses
import math
import pickle
import re
from typing import get_args

import pytest
import torch
from refusals import POSITIVE

import klfast
from klfast import Estimator
from klfast.args.estimator import SHORTHAND
from klfast.backends import BACKENDS
from klfast.formulas.estimators import FORMULAS
from klfast.types import names
from klfast.types.names import ALIASES, GRADIENTS, IMPORTANCE, NAMES, PLUS
from klfast.types.reduction import FRAMEWORKS_REDUCTIONS, REDUCTIONS, TORCHS_REDUCTIONS

FULL = {
    "name": "k2",
    "gradient": "k2",
    "importance": "detached",
    "importance_cap": 2.0,
    "log_ratio_clip": (-1.0, 3.0),
    "kl_clip": 5.0,
    "clip_weighted": True,
    "linear_tail": 4.0,
}


def test_its_fields_have_their_documented_order():
    assert Estimator(*FULL.values()) == Estimator(**FULL)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_its_estimator(alias, name):
    assert Estimator(alias).name == name
    assert Estimator(alias) == Estimator(name)
    assert hash(Estimator(alias)) == hash(Estimator(name))


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda estimator: pickle.loads(pickle.dumps(estimator)),
        dataclasses.replace,
        lambda estimator: eval(repr(estimator), {"Estimator": Estimator}),
    ],
    ids=["copy", "deepcopy", "pickle", "replace", "repr"],
)
def test_it_survives_being_copied(duplicate):
    estimator = Estimator(**FULL)
    again = duplicate(estimator)
    assert again == estimator
    assert again.encoded() == estimator.encoded()


LIMITS = ("importance_cap", "log_ratio_clip", "kl_clip", "linear_tail")


@pytest.mark.parametrize("field", LIMITS)
def test_a_limit_is_a_finite_number_above_0(field):
    for value in (0, -1, -0.0, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=rf"^{field} {POSITIVE}, got {value}$"):
            Estimator(**{field: value})
    for value in ("1", True, 1j, {1.0}, torch.tensor(1.0)):
        with pytest.raises(TypeError, match=f"^{field} {POSITIVE}, got .* of type"):
            Estimator(**{field: value})


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [
        ((1.0,), ValueError, r"log_ratio_clip must be .* a pair \(lo, hi\), got \(1.0,\)"),
        ((2, 1), ValueError, r"log_ratio_clip must have lo < hi, got \(2, 1\)"),
        ((1, 1), ValueError, r"log_ratio_clip must have lo < hi, got \(1, 1\)"),
        ((-math.inf, 1), ValueError, "log_ratio_clip must be a finite number, got -inf"),
        (("0", 1), TypeError, "log_ratio_clip must be a finite number, got '0' of type str"),
    ],
    ids=str,
)
def test_a_pair_of_bounds_is_two_rising_numbers(clip, error, message):
    with pytest.raises(error, match=message):
        Estimator(log_ratio_clip=clip)


@pytest.mark.parametrize(
    ("field", "called", "choices"),
    [
        ("name", "estimator", NAMES),
        ("gradient", "gradient", GRADIENTS),
        ("importance", "importance", IMPORTANCE),
    ],
)
def test_a_wrong_choice_lists_the_right_ones(field, called, choices):
    listed = re.escape(", ".join(map(repr, choices)))
    with pytest.raises(ValueError, match=f"^unknown {called} 'k9'; expected one of {listed}$"):
        Estimator(**{field: "k9"})
    for value in (None, 3, ["k3"]):
        with pytest.raises(TypeError, match=f"^unknown {called} .*; expected one of {listed}$"):
            Estimator(**{field: value})


def test_the_tables_have_the_names_of_the_types():
    assert tuple(FORMULAS) == names.ESTIMATORS == get_args(names.FormulaName)
    assert tuple(ALIASES) == get_args(names.AliasName)
    assert tuple(PLUS) == get_args(names.PlusName)
    assert tuple(SHORTHAND) == get_args(klfast.EstimatorName)
    assert tuple(REDUCTIONS) == get_args(klfast.ReductionName)
    assert get_args(klfast.DirectionName) == names.DIRECTIONS
    assert get_args(klfast.TailName) == names.TAILS
    assert ("auto", *BACKENDS) == get_args(klfast.BackendName)
    assert get_args(klfast.GradientName) == GRADIENTS
    assert set(TORCHS_REDUCTIONS.values()) < set(REDUCTIONS)


@pytest.mark.parametrize("name", PLUS)
def test_a_plus_is_the_gradient_of_k2(backend, name):
    plus = Estimator(name)
    assert plus == Estimator(name[:-1], gradient="k2", importance="detached")
    assert (plus.name, plus.gradient, plus.importance) == (name[:-1], "k2", "detached")
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    ref_logprobs = torch.tensor([[-1.5, -1.0]])
    for estimator in (name, plus):
        result = klfast.kl_penalty(logprobs, ref_logprobs, estimator=estimator, backend=backend)
        value = klfast.kl_penalty(
            logprobs.detach(), ref_logprobs, estimator=name[:-1], backend=backend
        )
        assert torch.equal(result, value)
        [gradient] = torch.autograd.grad(result.sum(), logprobs)
        assert torch.equal(gradient, logprobs - ref_logprobs)


@pytest.mark.parametrize(
    ("wrong", "likely"),
    [("K3", "k3"), ("kl", "k1"), ("low-var-kl", "low_var_kl"), ("k9", None), ("", None)],
)
def test_a_near_name_is_named(wrong, likely):
    guess = "" if likely is None else rf"; did you mean {re.escape(repr(likely))}\?"
    with pytest.raises(ValueError, match=rf"one of 'k1', .*'k3\+'{guess}$"):
        klfast.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), estimator=wrong)


@pytest.mark.parametrize(("name", "call"), FRAMEWORKS_REDUCTIONS.items())
def test_a_frameworks_reduction_is_answered_with_the_call(name, call):
    with pytest.raises(ValueError, match=re.escape(f"the call for {name!r} is {call}")):
        klfast.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), reduction=name)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("torchs", "ours"), TORCHS_REDUCTIONS.items())
def test_torch_s_reductions_are_answered_with_what_torch_computes(torchs, ours):
    logits, ref_logits = torch.randn(4, 1, 9), torch.randn(4, 1, 9)
    answer = (
        rf"expected one of 'none', 'seq-sum'.* klfast's name for torch's '{torchs}' is '{ours}'"
    )
    for function in (klfast.kl_penalty, klfast.kl_divergence):
        with pytest.raises(ValueError, match=answer):
            function(logits[..., 0], ref_logits[..., 0], reduction=torchs)
    expected = torch.nn.functional.kl_div(
        ref_logits.log_softmax(-1), logits.log_softmax(-1), reduction=torchs, log_target=True
    )
    if torchs == "mean":  # torch divides by the vocabulary's size too
        expected = expected * 9
    torch.testing.assert_close(klfast.kl_divergence(logits, ref_logits, reduction=ours), expected)
