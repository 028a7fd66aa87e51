"""AdaptiveKLCallback on real trainers: its steering, logs, checkpoints and errors."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from frameworks import controller_step as published_rule
from transformers import TrainerCallback
from trl import GRPOTrainer, RLOOTrainer

import klfast
from klfast.compat.trl import AdaptiveKLCallback

TRAINERS = [GRPOTrainer, RLOOTrainer]


def adaptive(target=0.05, horizon=40, **options):
    """Make the callback. Its coefficient changes by up to 0.2 * 4 / 40 of itself a step."""
    return lambda trainer: AdaptiveKLCallback(trainer, target, horizon, **options)


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_beta_follows_the_published_rule_from_the_kl_that_is_logged(tmp_path, trainer_class):
    run = tiny.train(trainer_class, tmp_path, steps=5, callbacks=[adaptive(0.3)])
    value = 0.1
    for kl, used in zip(run.column("kl"), run.column("kl_coef"), strict=True):
        assert used == pytest.approx(value, rel=1e-12)
        value = published_rule(value, kl, 0.3, 4, 40)
    assert run.trainer.beta == pytest.approx(value, rel=1e-12)
    assert run.trainer.beta != 0.1


def test_the_loss_uses_the_coefficient_that_is_logged(tmp_path):
    """A second trainer whose beta is set to the logged coefficients has the same losses."""
    run = tiny.train(GRPOTrainer, tmp_path / "adaptive", steps=4, callbacks=[adaptive()])
    coefficients = iter(run.column("kl_coef"))

    class ByHand(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            trainer.beta = next(coefficients)

    trainer = tiny.make(GRPOTrainer, tmp_path / "by-hand", steps=4, callbacks=[ByHand()])
    logs = tiny.finish(trainer).logs
    assert [log["loss"] for log in logs] == run.column("loss")
    assert len(set(run.column("kl_coef"))) == 4


def test_an_epoch_s_last_step_counts_what_it_has(tmp_path):
    class Count(TrainerCallback):
        micro_batches = (1,)

        def on_substep_end(self, args, state, control, **_):
            self.micro_batches = (*self.micro_batches[:-1], self.micro_batches[-1] + 1)

        def on_step_end(self, args, state, control, **_):
            self.micro_batches = (*self.micro_batches, 1)

    count = Count()
    config = {
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
        "max_steps": -1,
        "num_train_epochs": 1,
    }
    callbacks = [adaptive(), count]
    prompts = tiny.dataset(10)
    run = tiny.train(
        GRPOTrainer, tmp_path, steps=0, callbacks=callbacks, train_dataset=prompts, **config
    )
    many, few, _ = count.micro_batches
    assert few < many == 3
    first, second = run.column("kl_coef")
    kls = run.column("kl")
    assert second == pytest.approx(published_rule(first, kls[0], 0.05, 4 * many, 40), rel=1e-12)
    last = published_rule(second, kls[1], 0.05, 4 * few, 40)
    assert run.trainer.beta == pytest.approx(last, rel=1e-12)


def test_a_step_without_a_new_kl_leaves_beta_alone(tmp_path):
    """RLOO measures a KL once a generation."""
    config = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}
    run = tiny.train(RLOOTrainer, tmp_path, steps=4, callbacks=[adaptive()], **config)
    assert [kl is None for kl in run.column("kl")] == [False, True, False, True]
    one, two, three, four = run.column("kl_coef")
    assert one != two == three != four


def test_steps_between_logs_are_steered_too(tmp_path):
    every = tiny.train(GRPOTrainer, tmp_path / "1", steps=6, callbacks=[adaptive()])
    third = tiny.train(
        GRPOTrainer, tmp_path / "3", steps=6, callbacks=[adaptive()], logging_steps=3
    )
    assert third.trainer.beta == every.trainer.beta
    coefficients = every.column("kl_coef")
    means = [sum(coefficients[:3]) / 3, sum(coefficients[3:]) / 3]
    assert third.column("kl_coef") == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize("restore", [False, True], ids=["", "restore_callback_states"])
@pytest.mark.parametrize("patched", [False, True], ids=["trl", "klfast"])
@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_a_resumed_run_goes_on_exactly(tmp_path, trainer_class, patched, restore):
    options = {
        "callbacks": [adaptive()],
        "save_strategy": "steps",
        "save_steps": 2,
        "restore_callback_states_from_checkpoint": restore,
    }
    if patched:
        klfast.compat.patch("trl")
    try:
        whole = tiny.train(trainer_class, tmp_path / "whole", steps=5, **options)
        begun = tiny.train(trainer_class, tmp_path / "begun", steps=2, **options)
        resumed = tiny.train(
            trainer_class, tmp_path / "begun", steps=5, resume=begun.checkpoint(2), **options
        )
    finally:
        if patched:
            klfast.compat.unpatch("trl")
    assert resumed.logs[2:] == whole.logs[2:]
    assert resumed.trainer.beta == whole.trainer.beta != begun.trainer.beta
    assert torch.equal(resumed.parameters(), whole.parameters())


def test_evaluations_are_not_steered_by(tmp_path):
    config = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": tiny.dataset(8)}
    run = tiny.train(GRPOTrainer, tmp_path, steps=3, callbacks=[adaptive()], **config)
    one, two, _ = run.column("kl_coef")
    assert two == pytest.approx(published_rule(one, run.column("kl")[0], 0.05, 4, 40), rel=1e-12)


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_given_before_there_is_a_trainer_it_steers_the_one_it_is_given_to(tmp_path, trainer_class):
    """The callback may be in ``callbacks=[...]`` or added later. Both work like a named trainer."""
    named = tiny.train(trainer_class, tmp_path / "named", steps=4, callbacks=[adaptive(0.3)])
    given = tiny.train(
        trainer_class, tmp_path / "given", steps=4, at_init=[AdaptiveKLCallback(None, 0.3, 40)]
    )
    added = tiny.train(
        trainer_class,
        tmp_path / "added",
        steps=4,
        callbacks=[AdaptiveKLCallback(target=0.3, horizon=40)],
    )
    assert given.logs == added.logs == named.logs
    assert given.trainer.beta == added.trainer.beta == named.trainer.beta != 0.1


def test_it_keeps_to_the_first_trainer_that_it_is_given_to(tmp_path):
    callback = AdaptiveKLCallback(target=0.3)
    tiny.train(GRPOTrainer, tmp_path / "first", steps=1, at_init=[callback])
    second = tiny.make(GRPOTrainer, tmp_path / "second", steps=1, at_init=[callback])
    with pytest.raises(ValueError, match="trainer must be the trainer that has this callback"):
        tiny.finish(second)


def test_called_by_no_trainer_it_says_so():
    callback = AdaptiveKLCallback(target=0.3)
    with pytest.raises(RuntimeError, match="given to AdaptiveKLCallback outside of trainer"):
        callback.on_train_begin(None, object(), None)


class Halving:
    """A user's own controller."""

    def __init__(self):
        self.value, self.calls = 0.4, []

    def update(self, kl, n_steps):
        self.calls.append((kl, n_steps))
        self.value /= 2


class Saved(Halving):
    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_any_controller_steers_from_its_own_value(tmp_path, trainer_class):
    mine = Halving()
    run = tiny.train(
        trainer_class, tmp_path, steps=4, at_init=[AdaptiveKLCallback(controller=mine)]
    )
    assert run.column("kl_coef") == [0.4, 0.2, 0.1, 0.05]
    assert run.trainer.beta == mine.value == 0.025
    assert mine.calls == [(pytest.approx(kl), 4) for kl in run.column("kl")]


def test_the_state_of_any_controller_is_kept_if_it_has_one(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}

    def steered_by(controller, folder, **more):
        callback = AdaptiveKLCallback(controller=controller)
        return tiny.train(GRPOTrainer, tmp_path / folder, at_init=[callback], **options, **more)

    begun = steered_by(Saved(), "saved", steps=2)
    resumed = steered_by(Saved(), "saved", steps=4, resume=begun.checkpoint(2))
    assert resumed.trainer.beta == 0.025
    with pytest.raises(TypeError, match="controller must have load_state_dict to go on"):
        steered_by(Halving(), "saved", steps=4, resume=begun.checkpoint(2))
    begun = steered_by(Halving(), "plain", steps=2)
    saved = json.loads((Path(begun.checkpoint(2)) / "trainer_state.json").read_text())
    assert "klfast.AdaptiveKLCallback" not in saved["stateful_callbacks"]
    resumed = steered_by(Halving(), "plain", steps=3, resume=begun.checkpoint(2))
    assert resumed.trainer.beta == 0.2


LIKE_TRL = SimpleNamespace(beta=0.1, _metrics={}, num_generations=2)
OF_0 = SimpleNamespace(beta=0.0, _metrics={}, num_generations=2)
DUAL = partial(klfast.DualKLController, 0.3, 0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({}, TypeError, "target must be a finite number > 0, got None"),
        ({"target": 0.0}, ValueError, "target must be a finite number > 0"),
        ({"trainer": 0.1}, TypeError, "target must be a finite number > 0, got None"),
        ({"target": 6.0, "unit": "sequence"}, ValueError, "unit must be 'token'"),
        ({"target": 0.1, "process_group": "world"}, ValueError, "process_group must be None"),
        ({"target": 0.1, "controller": dict}, TypeError, "controller must be the class of"),
        ({"target": 0.1, "controller": "nupi"}, TypeError, "controller must be the class of .*str"),
        ({"target": 0.1, "controller": DUAL(unit="token")}, TypeError, "target must not be given"),
        ({"horizon": 9, "controller": DUAL(unit="token")}, TypeError, "horizon must not be given"),
        ({"controller": "nupi"}, TypeError, "controller must be the class of .*, got str"),
        ({"controller": DUAL()}, ValueError, "unit must be 'token'"),
        ({"controller": DUAL(unit="token", device="cpu")}, ValueError, "must have device=None"),
        ({"controller": DUAL(unit="token", floor=0.01)}, ValueError, "must have floor=None, got 0"),
        ({"controller": klfast.FixedKLController(0.0)}, ValueError, "value must be a finite"),
        ({"controller": klfast.KLMonitor(0.1)}, TypeError, "number value and update"),
        ({"trainer": object(), "target": 0.1}, TypeError, "GRPOTrainer .*, got object"),
        ({"trainer": OF_0, "target": 0.1}, ValueError, r"trainer\.beta must be > 0"),
        (
            {
                "trainer": LIKE_TRL, "controller": klfast.ScheduledKLController, "warmup": 3,
            },
            ValueError,
            "start must be > 0, got 0",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_what_cannot_steer_beta_is_refused(arguments, error, named):
    with pytest.raises(error, match=named):
        AdaptiveKLCallback(**arguments)
