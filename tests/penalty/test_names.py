"""The names of choices: each list once, and what a ``+`` means."""

import importlib
import re
from typing import get_args

import pytest
import torch

import klfast
from klfast import Estimator
from klfast.args.estimator import SHORTHAND
from klfast.args.rows import DIRECTIONS
from klfast.backends import BACKENDS
from klfast.types import names
from klfast.types.formulas import FORMULAS
from klfast.types.reduction import REDUCTIONS, TORCHS_REDUCTIONS


def test_the_tables_have_the_names_of_the_types():
    assert tuple(FORMULAS) == names.ESTIMATORS == get_args(names.FormulaName)
    assert tuple(names.ALIASES) == get_args(names.AliasName)
    assert tuple(names.PLUS) == get_args(names.PlusName)
    assert tuple(SHORTHAND) == get_args(klfast.EstimatorName)
    assert tuple(REDUCTIONS) == get_args(klfast.ReductionName)
    assert get_args(klfast.DirectionName) == DIRECTIONS
    assert get_args(klfast.TailName) == names.TAILS
    assert ("auto", *BACKENDS) == get_args(klfast.BackendName)
    assert get_args(klfast.GradientName) == names.GRADIENTS
    assert set(TORCHS_REDUCTIONS.values()) < set(REDUCTIONS)


@pytest.mark.parametrize("name", names.PLUS)
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
    rewards = klfast.kl_rewards(
        torch.zeros(1), logprobs, ref_logprobs, kl_coef=1.0, estimator=name, backend=backend
    )
    assert torch.equal(rewards, -value)


def test_a_plus_goes_with_limits_and_no_other_gradient():
    limited = Estimator("k3", gradient="k2", importance="detached", kl_clip=10)
    assert Estimator("k3+", kl_clip=10) == limited
    assert Estimator("k3+", gradient="k2", importance="detached") == Estimator("k3+")
    assert Estimator("k3").importance == "differentiable"
    with pytest.raises(ValueError, match=r"^gradient must be 'k2' of estimator 'k3\+', got 'none'"):
        Estimator("k3+", gradient="none")
    with pytest.raises(ValueError, match=r"^unknown gradient 'k3'"):
        Estimator("k3+", gradient="k3")


@pytest.mark.parametrize("wrong", ["k3++", "+", "abs+", "k3_ref+", "mse+", "k3 +"])
def test_other_names_have_no_plus(wrong):
    with pytest.raises(
        ValueError, match=r"expected one of 'k1', .*'k1\+', 'k2\+', 'k3\+'(; did you mean .*)?$"
    ):
        klfast.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), estimator=wrong)


@pytest.mark.parametrize(
    ("wrong", "likely"),
    [
        ("K3", "k3"),
        ("kl", "k1"),
        ("kl+", "k1+"),
        ("low-var-kl", "low_var_kl"),
        ("K3_REF", "k3_ref"),
    ],
)
def test_a_near_name_is_named(wrong, likely):
    with pytest.raises(ValueError, match=rf"; did you mean {re.escape(repr(likely))}\?$"):
        klfast.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), estimator=wrong)


@pytest.mark.parametrize("wrong", ["k9", "kullback", ""])
def test_a_name_that_is_near_to_none_is_left_alone(wrong):
    with pytest.raises(ValueError, match=r"'k3\+'$"):
        klfast.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), estimator=wrong)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_plus_under_torch_compile():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    ref_logprobs = torch.tensor([[-1.5, -1.0]])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(logprobs):
        return klfast.kl_penalty(logprobs, ref_logprobs, estimator="k3+", reduction="token-sum")

    torch._dynamo.reset()
    compiled(logprobs).backward()
    assert torch.equal(logprobs.grad, logprobs.detach() - ref_logprobs)
    torch._dynamo.reset()


@pytest.mark.parametrize(("torchs", "ours"), TORCHS_REDUCTIONS.items())
def test_torch_s_reductions_are_answered(torchs, ours):
    answer = rf"torch's '{torchs}' is '{ours}'.* expected one of 'none', 'seq-sum'"
    with pytest.raises(ValueError, match=answer):
        klfast.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), reduction=torchs)
    with pytest.raises(ValueError, match=answer):
        klfast.kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), reduction=torchs)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("torchs", "ours"), TORCHS_REDUCTIONS.items())
def test_the_answer_is_what_torch_computes(torchs, ours):
    logits, ref_logits = torch.randn(4, 1, 9), torch.randn(4, 1, 9)
    expected = torch.nn.functional.kl_div(
        ref_logits.log_softmax(-1), logits.log_softmax(-1), reduction=torchs, log_target=True
    )
    if torchs == "mean":  # torch's is over words too
        expected = expected * 9
    result = klfast.kl_divergence(logits, ref_logits, reduction=ours)
    torch.testing.assert_close(result, expected)


def test_dir_lists_what_is_public_and_submodules_are_there():
    assert dir(klfast) == klfast.__all__
    assert importlib.import_module("klfast.functional.logits").kl_divergence is klfast.kl_divergence
    assert importlib.import_module("klfast.args.rollout_presets").PRESETS


def test_a_mask_is_given_by_position():
    logits, ids = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    expected = klfast.token_logprobs(logits, ids, mask=mask)
    assert torch.equal(klfast.token_logprobs(logits, ids, mask), expected)
    assert (expected == 0).tolist() == (mask == 0).tolist()
    with pytest.raises(TypeError, match="positional"):
        klfast.token_logprobs(logits, ids, mask, 1.0)
