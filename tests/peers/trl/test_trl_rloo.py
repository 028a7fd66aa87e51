"""Real RLOOTrainer runs: with klfast's KL in the reward, every number logged is the same."""

import packages
import pytest
import tiny
import torch
from agreement_of_runs import assert_same_logs, assert_same_training
from trl import RLOOTrainer

import klfast
from klfast.compat import PatchError
from klfast.compat.targets import TARGETS


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"normalize_advantages": True, "beta": 1.0},
        {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2},
        {"reward_clip_range": (-0.5, 0.5), "num_generations": 4},
    ],
    ids=["default", "normalised", "off-policy", "clipped"],
)
def test_training_is_the_same(tmp_path, config):
    theirs = tiny.train(RLOOTrainer, tmp_path / "theirs", steps=3, **config)
    assert any(abs(kl) > 1e-3 for kl in theirs.column("kl") if kl is not None)
    with klfast.compat.patch("trl"):
        ours = tiny.train(RLOOTrainer, tmp_path / "ours", steps=3, **config)
    assert_same_training(ours, theirs)
    without = tiny.train(RLOOTrainer, tmp_path / "without", steps=3, **{**config, "beta": 1e-9})
    with pytest.raises(AssertionError):  # the penalty changes the training
        assert_same_training(without, theirs)


def test_the_kl_is_computed_by_klfast(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        klfast.compat.trl_losses,
        "sequence_kl",
        lambda *args: calls.append(args) or klfast.compat.trl.sequence_kl(*args),
    )
    with klfast.compat.patch("trl"):
        tiny.train(RLOOTrainer, tmp_path, steps=2)
    assert len(calls) == 2


def test_nan_in_the_padding_stays_there(tmp_path):
    """Log-probs of masked tokens poison TRL's reward, not klfast's."""

    def poison(trainer):
        original = trainer._get_per_token_logps_and_entropies

        def forward(model, ids, mask, keep, *args, **options):
            outputs = original(model, ids, mask, keep, *args, **options)
            if torch.is_grad_enabled():
                return outputs
            return (outputs[0].masked_fill(mask[:, -keep:] == 0, torch.nan), *outputs[1:])

        trainer._get_per_token_logps_and_entropies = forward

    clean = tiny.train(RLOOTrainer, tmp_path / "clean", steps=1)
    theirs = tiny.train(RLOOTrainer, tmp_path / "theirs", steps=1, configure=poison)
    assert theirs.logs[0]["kl"] != pytest.approx(clean.logs[0]["kl"])
    with klfast.compat.patch("trl"):
        ours = tiny.train(RLOOTrainer, tmp_path / "ours", steps=1, configure=poison)
    assert_same_logs([{"kl": ours.logs[0]["kl"]}], [{"kl": clean.logs[0]["kl"]}])


def test_a_trainer_without_the_statements_is_refused():
    before = vars(RLOOTrainer)["_generate_and_score_completions"]
    (rloo,) = (site for (site, *_) in TARGETS["trl"][0] if "rloo" in site.where)
    elsewhere = rloo._replace(where="trl.trainer.rloo_trainer:RLOOTrainer._compute_loss")
    with pytest.raises(PatchError, match=r"per_token_kl = .* once, got 0"):
        packages.apply("trl", ((elsewhere,),))
    assert vars(RLOOTrainer)["_generate_and_score_completions"] is before
