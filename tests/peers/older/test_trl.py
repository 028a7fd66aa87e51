"""``patch("trl")`` and the mixin in older releases of TRL 1.x: trainings are the same."""

from pathlib import Path

import pytest
import tiny
import torch
from agreement_of_runs import assert_same_training
from comparison import same_numbers
from sampler import sampling_off_policy
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer import utils

import klfast
from klfast.compat import trl


def test_the_release_is_the_one_asked_for(release):
    assert Path(utils.__file__).is_relative_to(release[0])


def test_all_that_there_is_is_known(release, whole_patch):
    left = [(each.where.rpartition(":")[2], each.reason) for each in whole_patch.left]
    later = {}
    if release[2] == "1.12.0":
        later = {"selective_log_softmax_and_entropy": "1.13"}
    assert left == [
        (name, f"the installed trl has none (as TRL until {last})") for name, last in later.items()
    ]
    assert len(whole_patch.replaced) == 19 - len(left)


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
def test_training_is_the_same(tmp_path, trainer):
    options = {"beta": 0.5, "num_iterations": 2, "steps_per_generation": 2}
    theirs = tiny.train(trainer, tmp_path / "theirs", steps=3, **options)
    with klfast.compat.patch("trl") as made:
        assert any(trainer.__name__ in each.where for each in made.replaced)
        ours = tiny.train(trainer, tmp_path / "ours", steps=3, **options)
    assert_same_training(ours, theirs)
    without = tiny.train(trainer, tmp_path / "without", steps=3, **{**options, "beta": 1e-9})
    with pytest.raises(AssertionError):  # the penalty changes the training
        assert_same_training(without, theirs)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_training_on_tokens_of_another_policy_is_the_same(tmp_path, mode):
    options = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": 1.2,
        "configure": sampling_off_policy(),
    }
    theirs = tiny.train(GRPOTrainer, tmp_path / "theirs", steps=3, **options)
    with klfast.compat.patch("trl"):
        ours = tiny.train(GRPOTrainer, tmp_path / "ours", steps=3, **options)
    assert "sampling/importance_sampling_ratio/mean" in theirs.logs[0]
    assert_same_training(ours, theirs)


def test_the_mixin_takes_the_release_s_trainer(tmp_path):
    mixed = type("Mixed", (trl.GRPOMixin, GRPOTrainer), {})
    theirs = tiny.train(GRPOTrainer, tmp_path / "theirs", steps=2)
    ours = tiny.train(mixed, tmp_path / "ours", steps=2)
    assert_same_training(ours, theirs)
    assert not torch.equal(ours.parameters(), theirs.parameters())


def logprobs(logits, index, temperature=1.0, row_mask=None):
    """TRL's function with a temperature and a mask, which 1.12 lacks."""
    found = utils.selective_log_softmax(logits / temperature, index)
    return found if row_mask is None else found * row_mask


test_over_logits = same_numbers(
    trl,
    {"selective_log_softmax": logprobs, "entropy_from_logits": utils.entropy_from_logits},
    *("trl logprobs", "trl entropy"),
)
