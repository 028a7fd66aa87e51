"""``patch("trl")`` in older releases of TRL 0.x: ``PPOTrainer``."""

import types
from pathlib import Path

import pytest
from comparison import assert_agrees, every_dtype, every_spread, inputs
from trl.trainer import utils
from trl.trainer.ppo_trainer import PPOTrainer

from klfast.compat import trl

KL_PENALTY = PPOTrainer._kl_penalty


def test_the_release_is_the_one_asked_for(release):
    assert Path(utils.__file__).is_relative_to(release[0])


def test_everything_is_known(whole_patch):
    assert whole_patch.left == ()
    assert [each.where.rpartition(":")[2] for each in whole_patch.replaced] == [
        "PPOTrainer._kl_penalty",
        "AdaptiveKLController",
        "FixedKLController",
    ]
    assert "trl.trainer.ppo_trainer" in whole_patch.replaced[1].modules


@every_dtype
@every_spread
@pytest.mark.parametrize("mode", ["kl", "abs", "mse"])
def test_every_mode(mode, spread, dtype):
    trainer = types.SimpleNamespace(config=types.SimpleNamespace(kl_penalty=mode))
    logprobs, ref_logprobs, *_ = inputs(spread, dtype)

    def theirs(logprobs, ref_logprobs, _):
        return KL_PENALTY(trainer, logprobs, ref_logprobs)

    assert_agrees(trl.kl_penalty, theirs, logprobs, ref_logprobs, mode)
