"""Real GRPOTrainer runs: every logged number is the same with klfast's KL and without.

klfast's KL is added to the loss after the reduction, not before. So numbers agree to a few
roundings of fp32, not bit for bit.
"""

import pytest
import tiny
import torch
from agreement_of_runs import assert_same_logs, assert_same_training
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

import klfast
from klfast.compat import PatchError
from klfast.compat.trl import GRPOMixin

OFF_POLICY = {
    "num_iterations": 2,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 2,
    "steps": 3,
}
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "vespo", "sapo", "luspo"]


class Mixed(GRPOMixin, GRPOTrainer):
    """A trainer as a user makes it."""


def both(folder, *, least_kl=1e-2, steps=3, **config):
    """(run with the mixin, run without). Their KL is above ``least_kl``."""
    theirs = tiny.train(GRPOTrainer, folder / "theirs", steps=steps, **config)
    assert min(theirs.column("kl")) > least_kl
    return tiny.train(Mixed, folder / "ours", steps=steps, **config), theirs


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type(tmp_path, loss_type):
    assert_same_training(*both(tmp_path, loss_type=loss_type, **OFF_POLICY))


@pytest.mark.parametrize(
    "config",
    [
        {"use_bias_correction_kl": False, **OFF_POLICY},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", **OFF_POLICY},
        {"importance_sampling_level": "sequence", "loss_type": "dapo", **OFF_POLICY},
        {"use_bias_correction_kl": False, "loss_type": "grpo"},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "dapo"},
        {"delta": 1.5, **OFF_POLICY},
        {"top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 0.01, **OFF_POLICY},
        {"mask_truncated_completions": True},
        {"bf16": True},
        {"beta": 5.0, "loss_type": "bnpo"},
        {"max_completion_length": 1},
    ],
    ids=lambda config: "-".join(map(str, config)),
)
def test_other_options(tmp_path, config):
    assert_same_training(*both(tmp_path, least_kl=1e-4, **config))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_policy_loss_beside_an_entropy_bonus_has_the_kl_in_it(tmp_path, loss_type):
    ours, theirs = both(tmp_path, entropy_coef=0.01, loss_type=loss_type, **OFF_POLICY)
    assert "policy_loss" in theirs.logs[0]
    assert_same_training(ours, theirs)


@pytest.mark.parametrize("loss_type", ["bnpo", "cispo"])
def test_evaluation(tmp_path, loss_type):
    config = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": tiny.dataset(8)}
    ours, theirs = both(tmp_path, loss_type=loss_type, gradient_accumulation_steps=2, **config)
    assert theirs.evaluations[0]["eval_kl"] > 0
    assert_same_training(ours, theirs)


def test_without_a_penalty_nothing_changes(tmp_path):
    ours = tiny.train(Mixed, tmp_path / "ours", steps=2, beta=0.0)
    theirs = tiny.train(GRPOTrainer, tmp_path / "theirs", steps=2, beta=0.0)
    assert ours.logs == theirs.logs
    assert torch.equal(ours.parameters(), theirs.parameters())


def test_patching_the_class_does_what_the_mixin_does(tmp_path):
    theirs = tiny.train(GRPOTrainer, tmp_path / "theirs", steps=3)
    mixed = tiny.train(Mixed, tmp_path / "mixed", steps=3)
    original = GRPOTrainer._compute_loss
    with klfast.compat.patch("trl"):
        assert GRPOTrainer._compute_loss is not original
        patched = tiny.train(GRPOTrainer, tmp_path / "patched", steps=3)
    assert GRPOTrainer._compute_loss is original
    assert patched.logs == mixed.logs
    assert torch.equal(patched.parameters(), mixed.parameters())
    assert_same_training(patched, theirs)
    again = tiny.train(GRPOTrainer, tmp_path / "again", steps=3)
    assert again.logs == theirs.logs


def test_the_kl_is_computed_by_klfast(tmp_path, monkeypatch):
    """Other tests would pass too if klfast were never called."""
    calls = []
    monkeypatch.setattr(
        klfast.compat.trl_losses,
        "fused_kl_penalty",
        lambda *args, **options: calls.append(options) or klfast.kl_penalty(*args, **options),
    )
    tiny.train(Mixed, tmp_path, steps=2, loss_type="grpo")
    assert [call["reduction"] for call in calls] == ["seq-mean-token-mean"] * 2


def test_nor_after_an_error(tmp_path):
    def fail(trainer):
        trainer.loss_type = "unheard of"

    trainer = tiny.make(Mixed, tmp_path, steps=1, configure=fail)
    with pytest.raises(ValueError, match="Unknown loss type"):
        tiny.finish(trainer)
    assert trainer.beta == 0.1
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)


def test_nan_in_the_padding_stays_there(tmp_path):
    """NaN in the reference's masked log-probs poisons TRL's loss, not klfast's."""

    def poison(trainer):
        original = trainer._prepare_inputs

        def prepare(batch):
            inputs = dict(original(batch))
            masked = inputs["completion_mask"] == 0
            assert masked.any()
            inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"].masked_fill(
                masked, torch.nan
            )
            return inputs

        trainer._prepare_inputs = prepare

    ours = tiny.train(Mixed, tmp_path / "ours", steps=2, configure=poison)
    clean = tiny.train(GRPOTrainer, tmp_path / "clean", steps=2)
    assert_same_logs(ours.logs, clean.logs)
    theirs = tiny.train(GRPOTrainer, tmp_path / "theirs", steps=1, configure=poison)
    assert theirs.logs[0]["kl"] is None or theirs.logs[0]["kl"] != theirs.logs[0]["kl"]


def test_a_trainer_with_a_loss_of_its_own_is_refused():
    said = (
        "^Other must derive from GRPOMixin and the GRPOTrainer that klfast knows, got "
        r"GMPOTrainer's _compute_loss; with trl 1\.16\.0 this code is not known to klfast, which "
        r"knows trl 1\.10 to 1\.16$"
    )
    with pytest.raises(PatchError, match=said):
        type("Other", (GRPOMixin, GMPOTrainer), {})
    for bases in [(GRPOMixin,), (GRPOTrainer, GRPOMixin)]:
        with pytest.raises(PatchError, match="must derive from GRPOMixin first"):
            type("Lonely", bases, {})


STATISTICS = (
    *("kl/token_mean", "kl/sequence_mean", "kl/k1", "kl/k2", "kl/k3"),
    *("kl/length", "kl/max_abs_log_ratio", "kl/clipped", "kl/nonfinite"),
)


class Logging(Mixed):
    log_kl_stats = True


def test_all_statistics_of_the_kl_are_logged_where_they_are_asked_for(tmp_path):
    plain = tiny.train(Mixed, tmp_path / "plain", steps=2)
    assert not any(name.startswith("kl/") for log in plain.logs for name in log)
    run = tiny.train(Logging, tmp_path / "logging", steps=2)
    others = [{k: v for k, v in log.items() if not k.startswith("kl/")} for log in run.logs]
    assert_same_training(run._replace(logs=others), plain)
    for log in run.logs:
        assert {name for name in log if name.startswith("kl/")} == {*STATISTICS}
        assert log["kl/token_mean"] == pytest.approx(log["kl"], rel=1e-5)
        assert log["kl/k3"] == pytest.approx(log["kl"], rel=1e-5)  # its weights are 1
        assert log["kl/length"] == pytest.approx(log["completions/mean_length"])


def test_another_estimator_by_the_mixin_and_by_the_patch(tmp_path):
    """Its gradient is another one off-policy, and an estimator with TRL's formula is TRL's."""
    others = type("Others", (GRPOMixin, GRPOTrainer), {"estimator": "k1"})
    theirs = tiny.train(Mixed, tmp_path / "theirs", **OFF_POLICY)
    mixed = tiny.train(others, tmp_path / "mixed", **OFF_POLICY)
    with klfast.compat.patch("trl", estimator="k1"):
        patched = tiny.train(GRPOTrainer, tmp_path / "patched", **OFF_POLICY)
        own = tiny.train(Mixed, tmp_path / "own", **OFF_POLICY)
    assert patched.logs == mixed.logs
    assert torch.equal(patched.parameters(), mixed.parameters())
    assert not torch.equal(mixed.parameters(), theirs.parameters())
    assert own.logs == theirs.logs
    with klfast.compat.patch("trl", estimator="k3"):
        same = tiny.train(GRPOTrainer, tmp_path / "same", **OFF_POLICY)
    assert torch.equal(same.parameters(), theirs.parameters())
    with pytest.raises(ValueError, match="unknown estimator 'k4'"):
        type("Unknown", (GRPOMixin, GRPOTrainer), {"estimator": "k4"})


def test_a_mixin_under_the_patch_adds_one_kl(tmp_path):
    theirs = tiny.train(GRPOTrainer, tmp_path / "theirs", steps=2)
    with klfast.compat.patch("trl"):
        both_ways = type("BothWays", (GRPOMixin, GRPOTrainer), {})
        ours = tiny.train(both_ways, tmp_path / "ours", steps=2)
    assert_same_training(ours, theirs)


def test_a_subclass_of_a_patched_class_may_add_to_its_loss(tmp_path):
    class Larger(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) + 1.0

    theirs = tiny.train(Larger, tmp_path / "theirs", steps=2)
    with klfast.compat.patch("trl"):
        ours = tiny.train(Larger, tmp_path / "ours", steps=2)
    assert theirs.logs[0]["loss"] > 0
    assert_same_training(ours, theirs)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_tool_mask(tmp_path, loss_type):
    def with_tools(trainer):
        original = trainer._prepare_inputs

        def prepare(batch):
            inputs = dict(original(batch))
            inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
            inputs["tool_mask"][:, ::3] = 0
            return inputs

        trainer._prepare_inputs = prepare

    ours, theirs = both(tmp_path, loss_type=loss_type, configure=with_tools)
    assert_same_training(ours, theirs)
    without = tiny.train(Mixed, tmp_path / "without", steps=3, loss_type=loss_type)
    assert without.logs != ours.logs


def test_a_changed_loss_is_left_alone_and_the_rest_replaced(monkeypatch):
    def _compute_loss(self, model, inputs):
        return 0.0

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", _compute_loss)
    with klfast.compat.patch("trl") as made:
        assert GRPOTrainer._compute_loss is _compute_loss
        (left,) = made.left
        assert left.where == "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
        assert "its code is none of those that klfast knows (1.10 to 1.16)" in left.reason
        replaced = {each.where.rpartition(":")[2] for each in made.replaced}
        assert {
            "RLOOTrainer._generate_and_score_completions",
            "selective_log_softmax",
            "GKDTrainer.generalized_jsd_loss",
        } <= replaced
    with pytest.raises(PatchError, match=r"not all of trl 1\.16\.0 is known"):
        klfast.compat.patch("trl", strict=True)
