"""The experiment's arms off the policy: their sampler, its correction, and what is said of them."""

from functools import cache

import experiment
import pytest
import torch

import klfast
from lab import train
from lab.model import continuation_logits, frozen_copy, new_pretraining, pretrain_step
from lab.settings import ARMS, PARTNER, Settings, off_policy
from lab.text import load_corpus

pytestmark = pytest.mark.exhaustive

OFF_POLICY = tuple(off_policy(ARMS))
TINY = {
    **experiment.TINY,
    "steps": 5,
    "arms": (PARTNER, *OFF_POLICY),
    "staleness": 2,
    "learning_rate": 0.02,
    "prompts": 3,
}


@cache
def reference(precision):
    settings = Settings(**TINY, precision=precision)
    pretraining = new_pretraining(load_corpus(), settings)
    for _ in range(settings.pretrain_steps):
        pretrain_step(pretraining, load_corpus(), settings)
    return pretraining.model


def trained(name, precision="float64", **changes):
    """(arm, its weights and its sampler's after each step)."""
    settings = Settings(**{**TINY, **changes}, precision=precision)
    world = train.build_world(load_corpus(), frozen_copy(reference(precision)), settings)
    arm = train.new_arm(name, world, settings)
    history = [(weights(arm.policy), None)]
    for _ in range(settings.steps):
        train.train_step(arm, world, settings)
        history.append((weights(arm.policy), arm.sampler and weights(arm.sampler)))
    return arm, history


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_same(one, other):
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


# The sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_a_matrix_is_rounded_to_fp8_with_one_scale(dtype):
    weight = torch.randn(64, 64, dtype=dtype)
    rounded = train.rounded(weight)
    assert rounded.dtype == dtype
    assert len(rounded.unique()) < 256
    assert rounded.abs().max() == pytest.approx(float(weight.abs().max()), rel=1e-6)
    step = weight.abs().max() / 448 * 2.0**-10  # half of the least step, below the normal numbers
    assert ((rounded - weight).abs() <= weight.abs() / 16 * (1 + 1e-6) + step).all()
    assert (rounded != weight).any()


@pytest.mark.parametrize("name", OFF_POLICY)
def test_the_sampler_is_the_rounded_policy_of_some_steps_ago(name):
    _, history = trained(name)
    for step, (_, sampler) in enumerate(history[1:]):
        then, _ = history[step - step % TINY["staleness"]]
        assert_same(sampler, {key: train.rounded(weight) for key, weight in then.items()})


# The correction


def test_the_gradient_is_that_of_weighted_tokens(monkeypatch):
    """Of policy gradient and penalty: the sum over tokens of what each has, times its weight."""
    seen, correct = {}, train.correct

    def watched(sampler, logprobs, batch, advantage, preset):
        seen.update(advantage=advantage, batch=batch, own=logprobs.clone())
        seen["corrected"] = correct(sampler, logprobs, batch, advantage, preset)
        return seen["corrected"]

    settings = Settings(**TINY, precision="float64")
    world = train.build_world(load_corpus(), frozen_copy(reference("float64")), settings)
    arm = train.new_arm("corrected", world, settings)
    train.train_step(arm, world, settings)
    monkeypatch.setattr(train, "correct", watched)
    backward = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd,
        "backward",
        lambda of, gradient: seen.update(gradient=gradient) or backward(of, gradient),
    )
    train.train_step(arm, world, settings)
    batch, corrected = seen["batch"], seen["corrected"]
    logits = continuation_logits(world.reference, batch.prompts, batch.continuations)
    ref = klfast.token_logprobs(logits, batch.continuations)
    x = seen["own"] - ref
    per_token = -seen["advantage"][:, None] + settings.low_coef * x
    expected = per_token * corrected.weights * corrected.mask / settings.batch
    torch.testing.assert_close(seen["gradient"], expected, rtol=1e-6, atol=1e-10)
    assert (corrected.weights[batch.mask] - 1).abs().max() > 0


# What is said
