"""``patch("trl")`` in older releases of TRL 0.x: ``PPOTrainer``."""

import types
from pathlib import Path

from comparison import same_numbers
from trl.trainer import utils
from trl.trainer.ppo_trainer import PPOTrainer

from klfast.compat import presets, trl

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


def penalty(logprobs, ref_logprobs, kl_penalty):
    trainer = types.SimpleNamespace(config=types.SimpleNamespace(kl_penalty=kl_penalty))
    return KL_PENALTY(trainer, logprobs, ref_logprobs)


test_penalties = same_numbers(
    trl, {"kl_penalty": penalty}, *(f"trl ppo {mode}" for mode in presets.TRL_PPO)
)
