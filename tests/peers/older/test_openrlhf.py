"""``patch("openrlhf")`` in older releases, with each form of ``compute_approx_kl``."""

import inspect
from importlib import metadata
from pathlib import Path

import torch
from comparison import inputs, same_numbers
from openrlhf.models import utils
from openrlhf.trainer.ppo_utils import experience_maker

import klfast
from klfast.compat import openrlhf, presets

VERSION = metadata.version("openrlhf")
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


def penalty(logprobs, ref_logprobs, log_probs_old=None, *, kl_estimator, **options):
    """OpenRLHF's function. 0.10 has no importance weight."""
    old = () if VERSION == "0.10.0" else (log_probs_old,)
    return utils.compute_approx_kl(logprobs, ref_logprobs, *old, kl_estimator, **options)


test_penalties = same_numbers(
    openrlhf,
    {"compute_approx_kl": penalty},
    *(f"openrlhf {mode}" for mode in presets.OPENRLHF),
    *(() if VERSION == "0.10.0" else ("openrlhf unbiased",)),
)


def test_the_experience_maker_calls_it_as_it_calls_its_own():
    logprobs, ref_logprobs, *_ = inputs(0.3, torch.float32)
    theirs = experience_maker.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
    with klfast.compat.patch("openrlhf"):
        assert experience_maker.compute_approx_kl is utils.compute_approx_kl
        ours = experience_maker.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours, theirs)
