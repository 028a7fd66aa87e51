"""The controllers: the fixed one, those with a target, the scheduled one.

The defaults of ``NuPIKLController`` and those below it hold a KL that follows the coefficient
within tens of updates, per sequence or per token.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args

from klfast.args.checks import check_choice, check_number
from klfast.controllers import rules
from klfast.controllers.base import CoefficientController
from klfast.controllers.inputs import Unit, check_count

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., None])
Scale = Literal["log", "linear"]
Shape = Literal["linear", "cosine"]
_CURVES: dict[str, rules.Curve] = {"linear": rules.linear, "cosine": rules.cosine}

FIXED_OPTIONS = ("device", "process_group")
MOST = 1_000.0  # the default ``max_coef``, in first coefficients


class FixedKLController(CoefficientController):
    """A coefficient that never changes, behind the interface of those that do.

    Args:
        kl_coef: the coefficient, in units of the loss per nat, finite and >= 0; 0 switches the
            penalty off.
        device: where ``value`` is a tensor; None for a float.
        process_group: the ranks that measure together; None for this process alone.

    Raises:
        TypeError, ValueError: ``kl_coef`` is not a number, negative, NaN or infinite.
    """

    _kind = "fixed"
    _rule = staticmethod(rules.fixed)

    def __init__(
        self,
        kl_coef: float,
        *,
        device: str | torch.device | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__("sequence", device, process_group)
        self._begin("kl_coef", kl_coef)


class _OtherOptions(TypedDict, total=False):
    """Those that have the same default in every controller with a target."""

    device: str | torch.device | None
    process_group: ProcessGroup | None
    dead_band: float
    ema: float
    floor: float | None


class TargetOptions(_OtherOptions, total=False):
    """The keywords of every controller with a target."""

    unit: Unit
    min_coef: float
    max_coef: float | None


class TargetController(CoefficientController):
    """The base of all controllers with a target, and the options that they all have.

    A subclass sets its own settings first, and then calls this ``__init__``.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``: about 6 per sequence or 0.1 per token.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"sequence"`` (of the sums over
            each sequence) or ``"token"`` (over all tokens).
        min_coef: the lower bound, > 0.
        max_coef: the upper bound, >= ``min_coef``. None: 1,000 times ``init_kl_coef`` (``floor``
            where that is 0), which stops a target in the wrong unit. ``math.inf`` for none.
        device: where ``value`` is a tensor, which ``update`` fills; None for a float.
        process_group: the ranks that measure together; None for this process alone.
        dead_band: >= 0; while ``abs(kl / target - 1) <= dead_band``, nothing moves. 0 for none.
        ema: the weight of the past in a moving average of the KL, in [0, 1). The controller then
            sees ``average = ema * average + (1 - ema) * kl``. 0 for the KL itself.
        floor: > 0; lets the coefficient be 0, at first and later. 0 then acts as ``floor``, which
            replaces ``min_coef``. The coefficient leaves 0 when the controller moves ``floor``
            upwards, and is 0 when the controller falls below it. With None the coefficient cannot
            be 0, because a controller that multiplies would never leave 0.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.
    """

    target: float

    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        unit: Unit = "sequence",
        min_coef: float = 1e-6,
        max_coef: float | None = None,
        device: str | torch.device | None = None,
        process_group: ProcessGroup | None = None,
        dead_band: float = 0.0,
        ema: float = 0.0,
        floor: float | None = None,
    ) -> None:
        super().__init__(unit, device, process_group)
        self.target = check_number("target", target, above=0)
        self.min_coef = check_number("min_coef", min_coef, above=0)
        self.floor = None if floor is None else check_number("floor", floor, above=0)
        self.dead_band = check_number("dead_band", dead_band, least=0)
        self.ema = check_part("ema", ema)
        given: Any = max_coef
        if max_coef is None:
            self._default_bound = math.inf
            # A first coefficient of 0 acts as the floor.
            first = self._check_value("init_kl_coef", init_kl_coef)
            self.max_coef = self._default_bound = MOST * max(first, self.lowest)
        # ``math.inf`` switches the bound off, and is no finite number.
        elif not (isinstance(given, Real) and given == math.inf):
            self.max_coef = check_number("max_coef", max_coef, least=self.lowest)
        self._begin("init_kl_coef", init_kl_coef)


def check_part(argument: str, value: object) -> float:
    """Return ``value`` as a float, or raise unless it is in [0, 1)."""
    number = check_number(argument, value, least=0)
    if number >= 1:
        raise ValueError(f"{argument} must be a finite number >= 0 and < 1, got {value!r}")
    return number


def shows_options(init: F) -> F:
    """Let help and signatures show the options that ``init`` hands on as ``**options``."""
    # A signature shows ``**options``, which tells a reader nothing.
    *own, _ = inspect.signature(init).parameters.values()
    names = [parameter.name for parameter in own]
    shared = inspect.signature(TargetController.__init__).parameters.values()
    parameters = [*own, *(parameter for parameter in shared if parameter.name not in names)]
    init.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    init.__annotations__ = TargetController.__init__.__annotations__ | init.__annotations__
    return init


class AdaptiveKLController(TargetController):
    """The proportional rule of Ziegler et al.: the coefficient rises while KL exceeds its target.

    ``value *= 1 + clip(current / target - 1, -clip, clip) * n_steps / horizon``, then limited to
    ``[min_coef, max_coef]``. Inside these bounds it is the published rule bit for bit, in float64.
    The bounds avoid that rule's two traps. A coefficient of 0 stays 0 for ever, because the rule
    multiplies. ``n_steps > horizon / clip`` can make the coefficient negative.

    How fast does a batch of n sequences move the coefficient, as a part of itself?
    At most clip * n / horizon a step; choose horizon of about n times the number of steps you want.

    Args:
        horizon: > 0, in sequences.
        clip: > 0; the largest relative error that counts.
        **options: see :class:`klfast.TargetController`, also for ``init_kl_coef`` and ``target``.

    Source: D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019,
    arXiv:1909.08593), section 2.2, and its code, lm-human-preferences.
    """

    _kind = "adaptive"
    _rule = staticmethod(rules.adaptive)
    _needs_n_steps = True
    _paced_by = "horizon"

    @shows_options
    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        horizon: float = 10_000,
        *,
        clip: float = 0.2,
        **options: Unpack[TargetOptions],
    ) -> None:
        self.horizon = check_number("horizon", horizon, above=0)
        self.clip = check_number("clip", clip, above=0)
        super().__init__(init_kl_coef, target, **options)

    def _pace(self, n_steps: Any) -> str:
        return (
            f"it moves by at most clip * n_steps / horizon = {self.clip:.3g} * {n_steps:.4g} / "
            f"{self.horizon:.4g} of itself a step: choose a horizon of about n_steps times the "
            "number of steps you want"
        )


class ExponentialKLController(TargetController):
    """The exponential rule: ``log(value)`` moves by the distance of KL from its target.

    ``value *= exp(gain * (current - target))``, then limited to ``[min_coef, max_coef]``. One step
    per ``update``, whatever the size of the batch.

    Args:
        gain: > 0; the change of ``log(value)`` per nat and update.
        unit, min_coef, max_coef: as there, with other defaults.
        **options: see :class:`klfast.TargetController`, also for ``init_kl_coef`` and ``target``.

    Source: klfast's own. It is dual ascent (:class:`klfast.DualKLController`) with the error in
    nats, not in units of the target.
    """

    _kind = "exponential"
    _rule = staticmethod(rules.exponential)
    _paced_by = "gain"

    @shows_options
    def __init__(
        self,
        init_kl_coef: float = 0.1,
        target: float = 0.1,
        *,
        gain: float = 0.1,
        unit: Unit = "token",
        min_coef: float = 1e-4,
        max_coef: float | None = 10.0,
        **options: Unpack[_OtherOptions],
    ) -> None:
        self.gain = check_number("gain", gain, above=0)
        super().__init__(
            init_kl_coef, target, unit=unit, min_coef=min_coef, max_coef=max_coef, **options
        )


class NuPIKLController(TargetController):
    """νPI control: proportional to the change of the error, integral of the error.

    With ``e = clip(current / target - 1, -clip, clip)`` and its moving average
    ``xi = nu * xi_before + (1 - nu) * e``, ``step = ki * e + kp * (xi - xi_before)``. Then
    ``value *= exp(step)`` on the scale ``"log"``, ``value += step`` on ``"linear"``, limited to
    ``[min_coef, max_coef]``. Before the first update xi_before is the first e, so that the first
    step is ``ki * e``. With ``kp=0`` this is dual ascent, with ``kp=ki`` and ``nu=0`` the
    optimistic gradient. There is no integral to wind up: the coefficient is the integral.

    Args:
        kp: the proportional gain, >= 0.
        ki: the integral gain, > 0.
        nu: the weight of the past in xi, in [0, 1).
        scale: ``"log"``: gains mean the same for small and large coefficients. ``"linear"``: the
            coefficient is the published multiplier, and gains are in its units.
        clip: > 0; the largest relative error that counts.
        **options: see :class:`klfast.TargetController`, also for ``init_kl_coef`` and ``target``.

    Source: M. Sohrabi et al., "On PI Controllers for Updating Lagrange Multipliers in Constrained
    Optimization" (ICML 2024, arXiv:2406.04558), algorithm 1, with the error in units of the target;
    the first step is that of cooper's ``nuPI`` with ``InitType.SGD``. The rule is the paper's, the
    default gains are klfast's, from the study in docs/controllers.md.
    """

    _kind = "nupi"
    _paced_by = "ki"

    @shows_options
    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        kp: float = 1.0,
        ki: float = 0.1,
        nu: float = 0.0,
        scale: Scale = "log",
        clip: float = 10.0,
        **options: Unpack[TargetOptions],
    ) -> None:
        check_choice("scale", scale, get_args(Scale))
        self.scale = scale
        self._rule = rules.nupi_of_log if scale == "log" else rules.nupi
        self.kp = check_number("kp", kp, least=0)
        self.ki = check_number("ki", ki, above=0)
        self.clip = check_number("clip", clip, above=0)
        self.nu = check_part("nu", nu)
        super().__init__(init_kl_coef, target, **options)

    def _initial_memory(self, settings: Any, value: rules.Number) -> rules.State:
        return {"xi": 0.0, "errors": 0.0}


class PIDLagrangianKLController(TargetController):
    """PID control of the coefficient as a Lagrange multiplier: ``value = kp * P + I + kd * D``.

    With ``e = clip(current / target - 1, -clip, clip)`` and the cost ``c = e + 1``:
    ``I = max(0, I + ki * e)``, ``P = p_ema * P + (1 - p_ema) * e``,
    ``J = d_ema * J + (1 - d_ema) * c`` and ``D = max(0, J - J of d_delay updates ago)``, where J is
    0 before the first update. ``init_kl_coef`` is the first I. The value is limited to
    ``[min_coef, max_coef]``, and so is I from above, lest it wind up.

    Args:
        kp, ki, kd: the gains, ki > 0, the others >= 0.
        p_ema, d_ema: the weights of the past in P and J, in [0, 1).
        d_delay: updates, >= 1.
        clip: > 0; the largest relative error that counts.
        **options: see :class:`klfast.TargetController`, also for ``init_kl_coef`` and ``target``.

    Source: A. Stooke et al., "Responsive Safety in Reinforcement Learning by PID Lagrangian
    Methods" (ICML 2020, arXiv:2007.03964), algorithm 2; averages, delay, kp and kd are by default
    those of omnisafe's ``PIDLagrangian``, with the cost in units of its limit. Its ki is 0.01, at
    which the study in docs/controllers.md does not hold a KL.
    """

    _kind = "pid-lagrangian"
    _rule = staticmethod(rules.pid)
    _paced_by = "ki"

    @shows_options
    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        kp: float = 0.1,
        ki: float = 0.0025,
        kd: float = 0.01,
        p_ema: float = 0.95,
        d_ema: float = 0.95,
        d_delay: int = 10,
        clip: float = 10.0,
        **options: Unpack[TargetOptions],
    ) -> None:
        self.kp = check_number("kp", kp, least=0)
        self.kd = check_number("kd", kd, least=0)
        self.ki = check_number("ki", ki, above=0)
        self.clip = check_number("clip", clip, above=0)
        self.p_ema = check_part("p_ema", p_ema)
        self.d_ema = check_part("d_ema", d_ema)
        self.d_delay = check_count("d_delay", d_delay, least=1)
        super().__init__(init_kl_coef, target, **options)

    def _initial_memory(self, settings: Any, value: rules.Number) -> rules.State:
        # One number each, because rules and checkpoints take plain numbers alone.
        delayed = {f"cost_ago_{age}": 0.0 for age in range(1, self.d_delay + 1)}
        return {"integral": value, "error_ema": 0.0, "cost_ema": 0.0, **delayed}


class DualKLController(TargetController):
    """Dual ascent on the logarithm of the coefficient, the Lagrange multiplier of ``KL <= target``.

    ``value *= exp(lr * e)`` with ``e = clip(current / target - 1, -clip, clip)``, then limited to
    ``[min_coef, max_coef]``. One step per ``update``.

    Args:
        lr: > 0; the change of ``log(value)`` per relative error of 1.
        clip: > 0; the largest relative error that counts.
        **options: see :class:`klfast.TargetController`, also for ``init_kl_coef`` and ``target``.

    Source: A. Abdolmaleki et al., "Maximum a Posteriori Policy Optimisation" (ICLR 2018,
    arXiv:1806.06920), and H. F. Song et al., "V-MPO" (ICLR 2020, arXiv:1909.12238), section 3.2.1:
    gradient steps on the dual ``value * (target - KL)``, here with the error in units of the target
    and on the logarithm, which keeps the multiplier positive. They use Adam, whose steps for a
    single number are all about ``lr``.
    """

    _kind = "dual"
    _rule = staticmethod(rules.dual)
    _paced_by = "lr"

    @shows_options
    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        lr: float = 0.03,
        clip: float = 10.0,
        **options: Unpack[TargetOptions],
    ) -> None:
        self.lr = check_number("lr", lr, above=0)
        self.clip = check_number("clip", clip, above=0)
        super().__init__(init_kl_coef, target, **options)


class DoublingKLController(TargetController):
    """PPO's adaptive penalty: the coefficient is doubled far above the target, halved far below.

    ``value *= factor`` if ``current > threshold * target``, ``value /= factor`` if
    ``current < target / threshold``; then limited to ``[min_coef, max_coef]``. The published rule
    acts after every batch (``every=1``), on a policy that has been trained on that batch to its
    end. A policy that follows the coefficient over several updates needs an ``every`` of about as
    many, or the coefficient runs away between its bounds.

    Args:
        factor: > 1.
        threshold: >= 1; the band without a change is ``[target / threshold, threshold * target]``.
        every: updates per change, >= 1.
        **options: see :class:`klfast.TargetController`, also for ``init_kl_coef`` and ``target``.

    Source: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017, arXiv:1707.06347),
    section 4.
    """

    _kind = "doubling"
    _rule = staticmethod(rules.doubling)
    _paced_by = "factor"

    @shows_options
    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        factor: float = 2.0,
        threshold: float = 1.5,
        every: int = 10,
        **options: Unpack[TargetOptions],
    ) -> None:
        self.factor = check_number("factor", factor, above=1)
        self.threshold = check_number("threshold", threshold, least=1)
        self.every = check_count("every", every, least=1)
        super().__init__(init_kl_coef, target, **options)

    def _initial_memory(self, settings: Any, value: rules.Number) -> rules.State:
        return {"waited": 0.0}


class ControlVAEKLController(TargetController):
    """ControlVAE's nonlinear PI control: ``value = kp / (1 + exp(-e)) + I``, ``I += ki * e``.

    With ``e = clip(current / target - 1, -clip, clip)``; then limited to ``[min_coef, max_coef]``.
    The first I is ``init_kl_coef - kp / 2``, so that the rule gives ``init_kl_coef`` on target. I
    rests while the coefficient is at a bound and e would drive it further out.

    Args:
        kp, ki: the gains, > 0. The published ones have the opposite sign of e, and ki < 0.
        clip: > 0; the largest relative error that counts.
        **options: see :class:`klfast.TargetController`, also for ``init_kl_coef`` and ``target``.

    Source: H. Shao et al., "ControlVAE: Controllable Variational Autoencoder" (ICML 2020,
    arXiv:2004.05988), section 3.2, with the error in units of the target. Its authors' code tests
    for saturation by a condition that never holds; here I does not wind up.
    """

    _kind = "control-vae"
    _rule = staticmethod(rules.control_vae)
    _paced_by = "ki"

    @shows_options
    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        kp: float = 0.1,
        ki: float = 0.01,
        clip: float = 10.0,
        **options: Unpack[TargetOptions],
    ) -> None:
        self.kp = check_number("kp", kp, above=0)
        self.ki = check_number("ki", ki, above=0)
        self.clip = check_number("clip", clip, above=0)
        super().__init__(init_kl_coef, target, **options)

    def _initial_memory(self, settings: Any, value: rules.Number) -> rules.State:
        # On target the rule adds kp / 2, so that it begins with ``init_kl_coef``.
        return {"integral": value - settings.kp / 2}


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
        steps: updates after the warm-up, >= 1.
        start: c before the first update, if there is a warm-up. >= 0, or > 0 with a target.
        final: c at the end. >= 0, or > 0 with a target. The default is 0, or 1 with a target.
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
    _changed_in_place = ("_stall", "_inner")
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
            self._rule = partial(rules.scheduled, _CURVES[shape])
            self.init_kl_coef = check_number("init_kl_coef", init_kl_coef, least=0)
            # The first coefficient is c(0), which is 1 without a warm-up.
            self._begin("init_kl_coef", self.init_kl_coef * (self.start if self.warmup else 1.0))
            return
        if not (isinstance(controller, type) and issubclass(controller, TargetController)):
            raise TypeError(
                f"controller must be the class of a controller with a target, got {controller!r}"
            )
        self.start = check_number("start", 1.0 if start is None else start, above=0)
        self.final = check_number("final", 1.0 if final is None else final, above=0)
        # It checks its own settings, and keeps no state of the run.
        self._inner = inner = controller(init_kl_coef, target, unit=unit, **options)
        self._rule = partial(rules.scheduled_target, _CURVES[shape])
        # Readers of this object look here for settings of the controller that steers.
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
            # Its limit is applied before this controller's.
            self._inner._hold(value)

    def _initial_memory(self, settings: Any, value: rules.Number) -> rules.State:
        of_rule = {} if self._inner is None else {**self._inner._state}
        # The coefficient is in this controller's own state.
        of_rule.pop("value", None)
        return {**of_rule, "step": 0.0}


_OF_ADAPTIVE = inspect.signature(AdaptiveKLController).parameters.values()
ADAPTIVE_OPTIONS = tuple(each.name for each in _OF_ADAPTIVE if each.kind is each.KEYWORD_ONLY)


def get_kl_controller(
    init_kl_coef: float, target: float | None = None, horizon: float = 10_000, **options: Any
) -> FixedKLController | AdaptiveKLController:
    """A fixed controller if ``target`` is None, else an adaptive one.

    Args:
        init_kl_coef: the coefficient, or the first one.
        target: the KL to hold in nats per sequence (per token with ``unit="token"``), or None.
        horizon: of ``AdaptiveKLController``; a fixed coefficient has no use for it.
        **options: the keywords of ``AdaptiveKLController``; of those a fixed coefficient has
            ``device`` and ``process_group``.

    Returns:
        :class:`FixedKLController` or :class:`AdaptiveKLController`.

    Raises:
        TypeError: an option is unknown or given without a target, or of the wrong type.
        ValueError: a setting is out of its range.
    """
    check_options(target, options)
    if target is None:
        return FixedKLController(init_kl_coef, **options)
    return AdaptiveKLController(init_kl_coef, target, horizon, **options)


def check_options(target: float | None, options: dict[str, Any]) -> None:
    """Raise unless a factory knows all options, and has a target for those that need one."""
    for option in options:
        try:
            check_choice("option", option, ("target", "horizon", *ADAPTIVE_OPTIONS))
        except ValueError as error:
            raise TypeError(str(error)) from None
    of_target = [option for option in options if option not in FIXED_OPTIONS]
    if target is None and of_target:
        raise TypeError(f"target must be a number when {', '.join(of_target)} is given, got None")
