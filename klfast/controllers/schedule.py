"""A schedule of the coefficient, or of the target of another controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from klfast.checks.arguments import check_choice, check_number
from klfast.controllers import rules
from klfast.controllers.base import CoefficientController
from klfast.controllers.inputs import Unit, check_count
from klfast.controllers.target import NuPIKLController, TargetController

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["ScheduledKLController"]

Shape = Literal["linear", "cosine"]
_CURVES: dict[str, rules.Curve] = {"linear": rules.linear, "cosine": rules.cosine}


class ScheduledKLController(CoefficientController):
    """A coefficient that follows a schedule, or a target that does.

    The curve c(t), t the number of updates that were not skipped: with ``s = (t - warmup) / steps``
    limited to [0, 1],

    - ``c = start + (1 - start) * t / warmup`` while ``t < warmup``; then
    - ``c = 1 + (final - 1) * s`` of the shape ``"linear"``,
    - ``c = 1 + (final - 1) * (1 - cos(pi * s)) / 2`` of the shape ``"cosine"``.

    Without a target the coefficient is ``init_kl_coef * c(t)``, whatever the KL is. With one,
    another controller steers it, and holds ``target * c(t)``. By default there is no warm-up, the
    coefficient of a schedule falls to 0, and a target stays.

    Args:
        init_kl_coef: the coefficient that c multiplies, >= 0; with a target the first one, within
            the controller's bounds.
        target: the KL that c multiplies, > 0, in nats per ``unit``; None for a schedule of the
            coefficient.
        shape: ``"linear"`` or ``"cosine"``.
        warmup: updates, >= 0.
        steps: updates after those of ``warmup``, >= 1.
        start: c before the first update, where there is a warm-up: >= 0, of a target > 0.
        final: c at the end: >= 0, of a target > 0; by default 0, of a target 1.
        controller: the class that steers, made by ``controller(init_kl_coef, target, **options)``.
        unit, device, process_group: as of :class:`klfast.TargetController`.
        **options: of ``controller``.

    Raises:
        TypeError: a setting is of the wrong type, or options are given without a target.
        ValueError: a setting is NaN, infinite or out of its range, or a choice is unknown.

    Source of the cosine: I. Loshchilov and F. Hutter, "SGDR" (ICLR 2017, arXiv:1608.03983),
    equation 5, without restarts.
    """

    _kind = "scheduled"
    _inner: TargetController | None = None

    def __init__(
        self,
        init_kl_coef: float,
        target: float | None = None,
        *,
        shape: Shape = "linear",
        warmup: int = 0,
        steps: int = 1_000,
        start: float | None = None,
        final: float | None = None,
        controller: type[TargetController] = NuPIKLController,
        unit: Unit = "sequence",
        device: str | torch.device | None = None,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(unit, device, process_group)
        check_choice("shape", shape, get_args(Shape))
        self.shape = shape
        self.warmup = check_count("warmup", warmup, least=0)
        self.steps = check_count("steps", steps, least=1)
        if target is None:
            if options:
                given = ", ".join(options)
                raise TypeError(f"target must be a number when {given} is given, got None")
            self.start = check_number("start", 0.0 if start is None else start, least=0)
            self.final = check_number("final", 0.0 if final is None else final, least=0)
            self._rule = rules.Scheduled(_CURVES[shape])
            self.init_kl_coef = check_number("init_kl_coef", init_kl_coef, least=0)
            self._begin("init_kl_coef", self.init_kl_coef * (self.start if self.warmup else 1.0))
            return
        if not (isinstance(controller, type) and issubclass(controller, TargetController)):
            raise TypeError(
                f"controller must be the class of a controller with a target, got {controller!r}"
            )
        self.start = check_number("start", 1.0 if start is None else start, above=0)
        self.final = check_number("final", 1.0 if final is None else final, above=0)
        self._inner = inner = controller(init_kl_coef, target, unit=unit, **options)
        self._rule = rules.ScheduledTarget(_CURVES[shape], inner._update_rule())
        self.rule, self.target = inner._kind, inner.target
        self.min_coef, self.max_coef, self.floor = inner.min_coef, inner.max_coef, inner.floor
        self._default_bound = inner._default_bound
        self._needs_n_steps = inner._needs_n_steps
        self._begin("init_kl_coef", init_kl_coef)

    def _target_now(self) -> float | None:
        if self.target is None:
            return None
        return self.target * float(_CURVES[self.shape](self, self._state["step"]))

    def _hold(self, value: float) -> None:
        super()._hold(value)
        if self._inner is not None:
            self._inner._hold(value)
            if self._device_state is not None:
                self._device_state.settings._inner.highest.fill_(self._inner.highest)

    def _steering(self) -> CoefficientController:
        return self if self._inner is None else self._inner

    def _first_memory(self, settings: Any, value: rules.Number) -> rules.State:
        of_rule = {} if self._inner is None else self._inner._numbers()
        of_rule.pop("value", None)
        return {**of_rule, "step": 0.0}
