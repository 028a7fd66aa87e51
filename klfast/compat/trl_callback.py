"""Adaptive KL for TRL's trainers. Needs transformers."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Trainer, TrainerCallback

from klfast.args.checks import check_number
from klfast.controllers.base import CoefficientController
from klfast.controllers.target import AdaptiveKLController, ScheduledKLController, TargetController

STATE = "klfast.AdaptiveKLCallback"
"""The key of the controller's state in a ``TrainerState``'s ``stateful_callbacks``."""


class AdaptiveKLCallback(TrainerCallback):  # type: ignore[misc]  # transformers may not be there
    """Steers the ``beta`` of a ``trl.GRPOTrainer`` or ``trl.RLOOTrainer`` towards a target KL.

    ``GRPOTrainer(..., callbacks=[AdaptiveKLCallback(target=0.05)])``, or later
    ``trainer.add_callback(AdaptiveKLCallback(target=0.05))``. After each optimizer step the
    controller moves ``beta``, by default Ziegler's:
    ``beta *= 1 + clip(kl / target - 1, -clip, clip) * n_steps / horizon`` (2019, section 2.2).
    ``kl`` is the mean of the step's values of TRL's metric ``kl``. TRL has reduced it over all
    ranks, so all ranks steer alike. ``n_steps`` is the number of completions in the step on all
    ranks. A step without a new value, as in RLOO between two generations, leaves ``beta`` alone.
    ``kl_coef``, the coefficient that a step used, is logged beside ``kl``. The state is kept in the
    checkpoint's ``trainer_state.json``, and ``trainer.train(resume_from_checkpoint=...)`` continues
    from it.

    Args:
        trainer: its ``beta``, > 0, is the first coefficient. After that the callback sets ``beta``.
            With ``beta=0`` TRL loads no reference model, and there is no KL to steer by. None:
            the trainer that the callback is given to, once it begins to train. An error about the
            trainer or about the settings with its ``beta`` then comes at that time.
        target: the KL to hold, > 0, in nats per *token*, as TRL's metric is. None with
            ``controller=klfast.ScheduledKLController``, for a schedule of the coefficient, and with
            an object for the controller.
        horizon: of ``klfast.AdaptiveKLController``, 10,000 by default; other controllers have none.
        controller: a class or an object. A class is called as ``controller(beta, target,
            **options)``: any of klfast's with a target, or ``klfast.ScheduledKLController``. An
            object, klfast's or another, has a number ``value`` > 0, which replaces the trainer's
            ``beta``, and ``update(kl, n_steps)``, which moves it. Its state is kept if it has
            ``state_dict()`` and ``load_state_dict(state)``.
        **options: of ``controller``, but not ``floor`` (at ``beta=0`` TRL measures no KL, and it
            would stay 0), ``device`` (TRL's KL and ``beta`` are numbers of the host), ``unit``
            (TRL's KL is per token) or ``process_group`` (TRL's KL covers all ranks).

    Raises:
        ValueError: ``trainer.beta`` is 0, or a setting is out of its range.
        TypeError: ``trainer`` has no ``beta`` and metrics like TRL's, or a setting is of the wrong
            type.
    """

    def __init__(
        self,
        trainer: Any = None,
        target: float | None = None,
        horizon: float | None = None,
        *,
        controller: Any = AdaptiveKLController,
        **options: Any,
    ) -> None:
        self.trainer: Any = None
        self.controller: Any = None
        self._seen = 0
        if horizon is not None:
            # Only if it was given: other controllers have no such argument.
            options = {"horizon": horizon, **options}
        if isinstance(controller, type):
            _check_rule(controller, target, options)
        else:
            _check_controller(controller, target, options)
            self.controller = controller
        # The controller needs the trainer's ``beta``, which may come later.
        self._recipe = (controller, target, options)
        if trainer is not None:
            self._bind(trainer)

    def _bind(self, trainer: Any) -> None:
        """Take a trainer, and make the controller from its ``beta``."""
        if not all(hasattr(trainer, name) for name in ("beta", "_metrics", "num_generations")):
            raise TypeError(
                "trainer must be a trl.GRPOTrainer or trl.RLOOTrainer, "
                f"got {type(trainer).__name__}"
            )
        if trainer.beta == 0:
            raise ValueError(
                "trainer.beta must be > 0 for a KL to be measured, got 0; set beta in its config"
            )
        if self.controller is None:
            rule, target, options = self._recipe
            made = rule(trainer.beta, target, **{"unit": "token", **options})
            if made.value == 0:
                raise ValueError(
                    "start must be > 0, got 0: TRL measures no KL where beta is 0, and the "
                    "schedule would not begin"
                )
            self.controller = made
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the trainer that begins, and the state of the checkpoint that it resumes from.

        Raises:
            ValueError: another trainer than this callback's begins to train, or the checkpoint has
                a state of another controller.
            TypeError: the checkpoint has a state, and the controller cannot load one.
        """
        if self.trainer is None:
            self._bind(_caller(state))
        # ``beta`` of the other trainer would not move.
        if state is not self.trainer.state:
            raise ValueError("trainer must be the trainer that has this callback, got another")
        saved = (state.stateful_callbacks or {}).get(STATE)
        if saved is not None:
            if not hasattr(self.controller, "load_state_dict"):
                raise TypeError(
                    "controller must have load_state_dict to go on from the checkpoint's state, "
                    f"got {type(self.controller).__name__}"
                )
            self.controller.load_state_dict(saved["attributes"])
        self.trainer.beta = float(self.controller.value)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember what had been measured before this step."""
        self._seen = len(self.trainer._metrics["train"]["kl"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the coefficient of the step, then move it."""
        # Before the update: the log has the coefficient that the step used.
        metrics = self.trainer._metrics["train"]
        metrics["kl_coef"].append(self.trainer.beta)
        new = metrics["kl"][self._seen :]
        if new:
            # Not args.gradient_accumulation_steps: an epoch's last step may have fewer of them.
            micro_batches = self.trainer.current_gradient_accumulation_steps
            completions = args.train_batch_size * micro_batches * args.world_size
            self.controller.update(sum(new) / len(new), completions)
            self.trainer.beta = float(self.controller.value)
        if hasattr(self.controller, "state_dict"):
            # With the layout of transformers' ExportableState, which wants callbacks that can be
            # made without arguments.
            attributes = self.controller.state_dict()
            state.stateful_callbacks[STATE] = {"args": {}, "attributes": attributes}


def _caller(state: Any) -> Any:
    """The trainer of ``state`` among the callers."""
    # transformers gives callbacks everything but the trainer.
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and caller.state is state:
            return caller
        frame = frame.f_back
    raise RuntimeError(
        "trainer must be given to AdaptiveKLCallback outside of trainer.train(), got None"
    )


_REFUSED = {
    "floor": "TRL measures no KL where beta is 0",
    "device": "TRL's KL and beta are numbers",
    "process_group": "TRL has averaged its KL over all ranks",
}


def _check_rule(rule: type, target: object, options: dict[str, Any]) -> None:
    """A class that can steer TRL's ``beta``, and options with which it can."""
    if not issubclass(rule, (TargetController, ScheduledKLController)):
        raise TypeError(f"controller must be {_STEERS} value and update, got {rule!r}")
    if target is not None or not issubclass(rule, ScheduledKLController):
        check_number("target", target, above=0)
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} must be None, got {options[name]!r}: {why}")
    _check_unit(options.get("unit", "token"))


def _check_unit(unit: object) -> None:
    if unit != "token":
        raise ValueError(f"unit must be 'token', in which TRL measures its KL, got {unit!r}")


def _check_controller(controller: Any, target: object, options: dict[str, Any]) -> None:
    """An object that can steer TRL's ``beta`` and has its settings already."""
    if isinstance(controller, CoefficientController):
        for name, why in _REFUSED.items():
            own = getattr(controller, name)
            if own is not None:
                raise ValueError(f"controller must have {name}=None, got {own!r}: {why}")
        if controller.target is not None:
            _check_unit(controller.unit)
    value = getattr(controller, "value", None)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and callable(getattr(controller, "update", None))):
        raise TypeError(
            f"controller must be {_STEERS} a number value and update(kl, n_steps), got "
            f"{type(controller).__name__}"
        )
    given = [*(["target"] if target is not None else []), *options]
    if given:
        raise TypeError(
            f"{given[0]} must not be given beside a controller object, which has its own settings"
        )
    check_number("controller.value", value, above=0)


_STEERS = "the class of a controller with a target, or an object with"
