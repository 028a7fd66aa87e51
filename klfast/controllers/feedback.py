"""Controllers with a target: PI and PID control, dual ascent, doubling.

The error of all is relative, ``e = clip(current / target - 1, -clip, clip)``, but of the doubling
one, which has none. The defaults hold a KL that follows the coefficient within tens of updates,
per sequence or per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from klfast.checks.arguments import check_choice
from klfast.controllers import rules
from klfast.controllers.arithmetic import Number
from klfast.controllers.base import TargetController, TargetOptions, check_part
from klfast.controllers.current import Unit, check_count

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "ControlVAEKLController",
    "DoublingKLController",
    "DualKLController",
    "NuPIKLController",
    "PIDLagrangianKLController",
]

Scale = Literal["log", "linear"]


class NuPIKLController(TargetController):
    """νPI control: proportional to the change of the error, integral of the error.

    With ``e = clip(current / target - 1, -clip, clip)`` and its moving average
    ``xi = nu * xi_before + (1 - nu) * e``, ``step = ki * e + kp * (xi - xi_before)``. Then
    ``value *= exp(step)`` on the scale ``"log"``, ``value += step`` on ``"linear"``, limited to
    ``[min_coef, max_coef]``. Before the first update xi_before is the first e, so that the first
    step is ``ki * e``. With ``kp=0`` this is dual ascent, with ``kp=ki`` and ``nu=0`` the
    optimistic gradient. There is no integral to wind up: the coefficient is the integral.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``.
        kp: the proportional gain, >= 0.
        ki: the integral gain, > 0.
        nu: the weight of the past in xi, in [0, 1).
        scale: ``"log"``: gains mean the same for small and large coefficients. ``"linear"``: the
            coefficient is the published multiplier, and gains are in its units.
        clip: > 0; the largest relative error that counts.
        unit, min_coef, max_coef: of every controller with a target, see
            :class:`klfast.controllers.base.TargetController`.
        **options: ``device``, ``process_group``, ``dead_band``, ``ema`` and ``floor``: see there.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: M. Sohrabi et al., "On PI Controllers for Updating Lagrange Multipliers in Constrained
    Optimization" (ICML 2024, arXiv:2406.04558), algorithm 1, with the error in units of the target;
    the first step is that of cooper's ``nuPI`` with ``InitType.SGD``. The rule is the paper's, the
    default gains are klfast's, from the study in docs/controllers.md.
    """

    _kind = "nupi"
    _paced_by = "ki"
    kp: float
    ki: float
    clip: float

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
        unit: Unit = "sequence",
        min_coef: float = 1e-6,
        max_coef: float | None = None,
        **options: Unpack[TargetOptions],
    ) -> None:
        super().__init__(target, unit, min_coef, max_coef, **options)
        check_choice("scale", scale, get_args(Scale))
        self.scale = scale
        self._set(least=0, kp=kp)
        self._set(above=0, ki=ki, clip=clip)
        self.nu = check_part("nu", nu)
        self._begin("init_kl_coef", init_kl_coef)

    def _rule_of_settings(self) -> rules.Rule:
        return rules.nupi_of_log if self.scale == "log" else rules.nupi

    def _first_memory(self, settings: Any, value: Number) -> rules.State:
        return {"xi": 0.0, "errors": 0.0}


class PIDLagrangianKLController(TargetController):
    """PID control of the coefficient as a Lagrange multiplier: ``value = kp * P + I + kd * D``.

    With ``e = clip(current / target - 1, -clip, clip)`` and the cost ``c = e + 1``:
    ``I = max(0, I + ki * e)``, ``P = p_ema * P + (1 - p_ema) * e``,
    ``J = d_ema * J + (1 - d_ema) * c`` and ``D = max(0, J - J of d_delay updates ago)``, where J is
    0 before the first update. ``init_kl_coef`` is the first I. The value is limited to
    ``[min_coef, max_coef]``, and so is I from above, lest it wind up.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``.
        kp, ki, kd: the gains, ki > 0, the others >= 0.
        p_ema, d_ema: the weights of the past in P and J, in [0, 1).
        d_delay: updates, >= 1.
        clip: > 0; the largest relative error that counts.
        unit, min_coef, max_coef: of every controller with a target, see
            :class:`klfast.controllers.base.TargetController`.
        **options: ``device``, ``process_group``, ``dead_band``, ``ema`` and ``floor``: see there.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: A. Stooke et al., "Responsive Safety in Reinforcement Learning by PID Lagrangian
    Methods" (ICML 2020, arXiv:2007.03964), algorithm 2; averages, delay, kp and kd are by default
    those of omnisafe's ``PIDLagrangian``, with the cost in units of its limit. Its ki is 0.01, at
    which the study in docs/controllers.md does not hold a KL.
    """

    _kind = "pid-lagrangian"
    _rule = staticmethod(rules.pid)
    _paced_by = "ki"
    kp: float
    ki: float
    kd: float
    clip: float

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
        unit: Unit = "sequence",
        min_coef: float = 1e-6,
        max_coef: float | None = None,
        **options: Unpack[TargetOptions],
    ) -> None:
        super().__init__(target, unit, min_coef, max_coef, **options)
        self._set(least=0, kp=kp, kd=kd)
        self._set(above=0, ki=ki, clip=clip)
        self.p_ema = check_part("p_ema", p_ema)
        self.d_ema = check_part("d_ema", d_ema)
        self.d_delay = check_count("d_delay", d_delay, least=1)
        self._begin("init_kl_coef", init_kl_coef)

    def _first_memory(self, settings: Any, value: Number) -> rules.State:
        delayed = {f"cost_ago_{age}": 0.0 for age in range(1, self.d_delay + 1)}
        return {"integral": value, "error_ema": 0.0, "cost_ema": 0.0, **delayed}


class DualKLController(TargetController):
    """Dual ascent on the logarithm of the coefficient, the Lagrange multiplier of ``KL <= target``.

    ``value *= exp(lr * e)`` with ``e = clip(current / target - 1, -clip, clip)``, then limited to
    ``[min_coef, max_coef]``. One step per ``update``.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``.
        lr: > 0; the change of ``log(value)`` per relative error of 1.
        clip: > 0; the largest relative error that counts.
        unit, min_coef, max_coef: of every controller with a target, see
            :class:`klfast.controllers.base.TargetController`.
        **options: ``device``, ``process_group``, ``dead_band``, ``ema`` and ``floor``: see there.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: A. Abdolmaleki et al., "Maximum a Posteriori Policy Optimisation" (ICLR 2018,
    arXiv:1806.06920), and H. F. Song et al., "V-MPO" (ICLR 2020, arXiv:1909.12238), section 3.2.1:
    gradient steps on the dual ``value * (target - KL)``, here with the error in units of the target
    and on the logarithm, which keeps the multiplier positive. They use Adam, whose steps for a
    single number are all about ``lr``.
    """

    _kind = "dual"
    _rule = staticmethod(rules.dual)
    _paced_by = "lr"
    lr: float
    clip: float

    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        lr: float = 0.03,
        clip: float = 10.0,
        unit: Unit = "sequence",
        min_coef: float = 1e-6,
        max_coef: float | None = None,
        **options: Unpack[TargetOptions],
    ) -> None:
        super().__init__(target, unit, min_coef, max_coef, **options)
        self._set(above=0, lr=lr, clip=clip)
        self._begin("init_kl_coef", init_kl_coef)


class DoublingKLController(TargetController):
    """PPO's adaptive penalty: the coefficient is doubled far above the target, halved far below.

    ``value *= factor`` if ``current > threshold * target``, ``value /= factor`` if
    ``current < target / threshold``; then limited to ``[min_coef, max_coef]``. The published rule
    acts after every batch (``every=1``), on a policy that has been trained on that batch to its
    end. A policy that follows the coefficient over several updates needs an ``every`` of about as
    many, or the coefficient runs away between its bounds.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``.
        factor: > 1.
        threshold: >= 1; the band without a change is ``[target / threshold, threshold * target]``.
        every: updates per change, >= 1.
        unit, min_coef, max_coef: of every controller with a target, see
            :class:`klfast.controllers.base.TargetController`.
        **options: ``device``, ``process_group``, ``dead_band``, ``ema`` and ``floor``: see there.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017, arXiv:1707.06347),
    section 4.
    """

    _kind = "doubling"
    _rule = staticmethod(rules.doubling)
    _paced_by = "factor"
    factor: float
    threshold: float

    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        factor: float = 2.0,
        threshold: float = 1.5,
        every: int = 10,
        unit: Unit = "sequence",
        min_coef: float = 1e-6,
        max_coef: float | None = None,
        **options: Unpack[TargetOptions],
    ) -> None:
        super().__init__(target, unit, min_coef, max_coef, **options)
        self._set(above=1, factor=factor)
        self._set(least=1, threshold=threshold)
        self.every = check_count("every", every, least=1)
        self._begin("init_kl_coef", init_kl_coef)

    def _first_memory(self, settings: Any, value: Number) -> rules.State:
        return {"waited": 0.0}


class ControlVAEKLController(TargetController):
    """ControlVAE's nonlinear PI control: ``value = kp / (1 + exp(-e)) + I``, ``I += ki * e``.

    With ``e = clip(current / target - 1, -clip, clip)``; then limited to ``[min_coef, max_coef]``.
    The first I is ``init_kl_coef - kp / 2``, so that the rule gives ``init_kl_coef`` on target. I
    rests while the coefficient is at a bound and e would drive it further out.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``.
        kp, ki: the gains, > 0. The published ones have the opposite sign of e, and ki < 0.
        clip: > 0; the largest relative error that counts.
        unit, min_coef, max_coef: of every controller with a target, see
            :class:`klfast.controllers.base.TargetController`.
        **options: ``device``, ``process_group``, ``dead_band``, ``ema`` and ``floor``: see there.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: H. Shao et al., "ControlVAE: Controllable Variational Autoencoder" (ICML 2020,
    arXiv:2004.05988), section 3.2, with the error in units of the target. Its authors' code tests
    for saturation by a condition that never holds; here I does not wind up.
    """

    _kind = "control-vae"
    _rule = staticmethod(rules.control_vae)
    _paced_by = "ki"
    kp: float
    ki: float
    clip: float

    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        *,
        kp: float = 0.1,
        ki: float = 0.01,
        clip: float = 10.0,
        unit: Unit = "sequence",
        min_coef: float = 1e-6,
        max_coef: float | None = None,
        **options: Unpack[TargetOptions],
    ) -> None:
        super().__init__(target, unit, min_coef, max_coef, **options)
        self._set(above=0, kp=kp, ki=ki, clip=clip)
        self._begin("init_kl_coef", init_kl_coef)

    def _first_memory(self, settings: Any, value: Number) -> rules.State:
        return {"integral": value - settings.kp / 2}
