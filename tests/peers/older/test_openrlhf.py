"""``patch("openrlhf")`` in older releases, with each form of ``compute_approx_kl``."""

import inspect
from pathlib import Path

import pytest
import torch
from comparison import assert_agrees, every_dtype, every_spread, inputs
from openrlhf.models import utils
from openrlhf.trainer.ppo_utils import experience_maker

import klfast
from klfast.compat import openrlhf

OURS = {"0.10.0": openrlhf.compute_approx_kl_unweighted, "0.11.1": openrlhf.compute_approx_kl}


def test_the_release_is_the_one_asked_for(release):
    assert Path(utils.__file__).is_relative_to(release[0])


def test_everything_is_known(whole_patch):
    assert whole_patch.left == ()
    assert len(whole_patch.replaced) == 6


def test_the_replacement_has_the_release_s_arguments(release):
    theirs, ours = (
        [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (utils.compute_approx_kl, OURS[release[2]])
    )
    assert ours == theirs


@every_dtype
@every_spread
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_estimator(release, monkeypatch, estimator, spread, dtype):
    logprobs, ref_logprobs, old_logprobs, _ = inputs(spread, dtype)

    def theirs(*args):
        with monkeypatch.context() as patched:  # their upcast to fp32 made one to float64
            patched.setattr(torch.Tensor, "float", torch.Tensor.double)
            return utils.compute_approx_kl(*args)

    options = [(estimator,)]
    if release[2] == "0.11.1":
        options = [(None, estimator), (None, estimator, True), (old_logprobs, estimator, True)]
    for each in options:
        assert_agrees(OURS[release[2]], theirs, logprobs, ref_logprobs, *each)


def test_the_experience_maker_calls_it_as_it_calls_its_own():
    logprobs, ref_logprobs, *_ = inputs(0.3, torch.float32)
    theirs = experience_maker.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
    with klfast.compat.patch("openrlhf"):
        assert experience_maker.compute_approx_kl is utils.compute_approx_kl
        ours = experience_maker.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours, theirs)
