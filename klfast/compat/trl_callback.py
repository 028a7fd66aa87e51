"""Adaptive KL for TRL's trainers. Needs transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from klfast.control.base import CoefficientController, TargetController
from klfast.control.controllers import AdaptiveKLController
from klfast.control.scheduled import ScheduledKLController

STATE = "klfast.AdaptiveKLCallback"
"""Where the controller's state lies among a ``TrainerState``'s ``stateful_callbacks``."""


class AdaptiveKLCallback(TrainerCallback):  # type: ignore[misc]  # transformers may not be there
    """Steers the ``beta`` of a ``trl.GRPOTrainer`` or ``trl.RLOOTrainer`` towards a target KL.

    ``trainer.add_callback(AdaptiveKLCallback(trainer, target=0.05))``. After each optimizer step
    the controller moves ``beta``, by default Ziegler's:
    ``beta *= 1 + clip(kl / target - 1, -clip, clip) * n_steps / horizon`` (2019, section 2.2).
    ``kl`` is the mean of the step's values of TRL's metric ``kl``, which TRL has reduced over all
    ranks, so that all ranks steer alike, and ``n_steps`` is the number of completions in the step
    on all ranks. A step without a new value, as in RLOO between two generations, leaves ``beta``
    alone. ``kl_coef``, the coefficient that a step used, is logged beside ``kl``. The state is kept
    in the checkpoint's ``trainer_state.json``, and ``trainer.train(resume_from_checkpoint=...)``
    goes on from it.

    Args:
        trainer: whose ``beta``, > 0, is the first coefficient; from here on it is the callback's to
            set. With ``beta=0`` TRL loads no reference model, and there is no KL to steer by.
        target: the KL to hold, > 0, in nats per *token*, as TRL's metric is. None with
            ``controller=klfast.ScheduledKLController``, for a schedule of the coefficient.
        horizon: of ``klfast.AdaptiveKLController``, 10,000 by default; other rules have none.
        controller: the class that steers, made by ``controller(beta, target, **options)``: any of
            klfast's with a target, or ``klfast.ScheduledKLController``.
        **options: of ``controller``, but ``floor`` (where ``beta`` is 0 TRL measures no KL, and it
            would stay 0) and ``device`` (TRL's KL and ``beta`` are numbers of the host).

    Raises:
        ValueError: ``trainer.beta`` is 0, or a setting is out of its range.
        TypeError: ``trainer`` has no ``beta`` and metrics like TRL's, or a setting is of the wrong
            type.
    """

    def __init__(
        self,
        trainer: Any,
        target: float | None,
        horizon: float | None = None,
        *,
        controller: type[CoefficientController] = AdaptiveKLController,
        **options: Any,
    ) -> None:
        if not all(hasattr(trainer, name) for name in ("beta", "_metrics", "num_generations")):
            raise TypeError(
                "trainer must be a trl.GRPOTrainer or trl.RLOOTrainer, "
                f"got {type(trainer).__name__}"
            )
        if trainer.beta == 0:
            raise ValueError(
                "trainer.beta must be > 0 for a KL to be measured, got 0; set beta in its config"
            )
        self.trainer = trainer
        self.controller = _controller(controller, trainer.beta, target, horizon, options)
        self._seen = 0

    @property
    def _kls(self) -> list[float]:
        kls: list[float] = self.trainer._metrics["train"]["kl"]
        return kls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take up the state of the checkpoint that is resumed from, if there is one.

        Raises:
            ValueError: another trainer than this callback's begins to train.
        """
        if state is not self.trainer.state:
            raise ValueError("trainer must be the one that the callback is added to, got another")
        saved = (state.stateful_callbacks or {}).get(STATE)
        if saved is not None:
            self.controller.load_state_dict(saved["attributes"])
        self.trainer.beta = self.controller.value

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember what had been measured before this step."""
        self._seen = len(self._kls)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the coefficient of the step, then move it."""
        self.trainer._metrics["train"]["kl_coef"].append(self.trainer.beta)
        new = self._kls[self._seen :]
        if new:
            # Not args.gradient_accumulation_steps: an epoch's last step may have fewer of them.
            micro_batches = self.trainer.current_gradient_accumulation_steps
            completions = args.train_batch_size * micro_batches * args.world_size
            self.trainer.beta = self.controller.update(sum(new) / len(new), completions)
        # With the layout of transformers' ExportableState, which wants callbacks that can be made
        # without a trainer.
        state.stateful_callbacks[STATE] = {"args": {}, "attributes": self.controller.state_dict()}


def _controller(
    controller: object,
    beta: float,
    target: float | None,
    horizon: float | None,
    options: dict[str, Any],
) -> CoefficientController:
    steering = (TargetController, ScheduledKLController)
    if not (isinstance(controller, type) and issubclass(controller, steering)):
        raise TypeError(
            f"controller must be the class of a controller with a target, got {controller!r}"
        )
    if options.get("floor") is not None:
        raise ValueError(
            f"floor must be None, got {options['floor']!r}: TRL measures no KL where beta is 0"
        )
    if options.get("device") is not None:
        raise ValueError(
            f"device must be None, got {options['device']!r}: TRL's KL and beta are numbers"
        )
    if horizon is not None:
        options = {"horizon": horizon, **options}
    make: Any = controller
    made: CoefficientController = make(beta, target, **{"unit": "token", **options})
    if made.value == 0:
        raise ValueError(
            "start must be > 0, got 0: TRL measures no KL where beta is 0, and the schedule would "
            "not begin"
        )
    return made
