"""Controllers: rules that steer the coefficient of the KL penalty after each batch.

A training loop takes its step with ``controller.value`` and then reports the KL it measured::

    controller = klfast.AdaptiveKLController(init_kl_coef=0.1, target=6.0)
    loss_kl, stats = klfast.kl_penalty(
        logprobs, ref_logprobs, mask, estimator="k3+",
        reduction="seq-mean-token-sum", coef=controller.value, return_stats=True,
    )
    loss_kl.backward()  # with the loss of the policy, then the optimizer's step
    controller.update(stats)

On the host, the default, controllers keep plain floats, and reading a KL that lives on a GPU waits
for it. With ``device=`` the coefficient is a tensor there, and nothing waits; its bits are those of
the host's. In data-parallel training ``process_group=`` makes every rank measure with the others.

A checkpoint (``state_dict``) holds what a run has changed: the coefficient, the count of skipped
values and what the rule remembers. The settings (horizon, bounds, ...) are the constructor's: a run
resumed with the same ones continues bit for bit, on any number of ranks. Of the settings a
checkpoint names two. A controller of another unit refuses it; one with another target takes it, and
steers to its own target from the coefficient that the run had reached.

The rules themselves are in ``klfast.controllers.rules``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klfast.controllers import rules
from klfast.controllers.base import CoefficientController, TargetController, TargetOptions
from klfast.controllers.current import Unit

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

__all__ = [
    "AdaptiveKLController",
    "ExponentialKLController",
    "FixedKLController",
    "get_kl_controller",
]

FIXED_OPTIONS = ("device", "process_group")
ADAPTIVE_OPTIONS = ("clip", "unit", "min_coef", "max_coef", *TargetOptions.__annotations__)


class FixedKLController(CoefficientController):
    """A coefficient that never changes, behind the interface of those that do.

    Args:
        kl_coef: the coefficient, in units of the loss per nat, finite and >= 0; 0 switches the
            penalty off.
        device: where the coefficient lives; None for the host.
        process_group: the ranks that measure together; None for this process alone.

    Raises:
        TypeError: ``kl_coef`` is not a number.
        ValueError: ``kl_coef`` is negative, NaN or infinite.
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


class AdaptiveKLController(TargetController):
    """The proportional rule of Ziegler et al.: the coefficient rises while KL exceeds its target.

    ``value *= 1 + clip(current / target - 1, -clip, clip) * n_steps / horizon``, then limited to
    ``[min_coef, max_coef]``. Within them it is the published rule bit for bit, in float64. They
    keep it out of that rule's two traps: 0, which no product leaves, and a negative coefficient,
    which ``n_steps > horizon / clip`` leads to.

    How fast does a batch of n sequences move the coefficient, as a part of itself?
    At most clip * n / horizon a step; choose horizon of about n times the number of steps you want.

    Args:
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``: about 6 per sequence or 0.1 per token.
        horizon: > 0, in sequences.
        clip: > 0; the largest relative error that counts.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"sequence"`` (of the sums over
            each sequence) or ``"token"`` (over all tokens).
        min_coef: the lower bound, > 0.
        max_coef: the upper bound, >= ``min_coef``. None: 1,000 times ``init_kl_coef``, which stops
            a target in the wrong unit. ``math.inf`` for none.
        **options: ``device``, ``process_group``, ``dead_band``, ``ema`` and ``floor``, of every
            controller with a target: see :class:`klfast.controllers.base.TargetController`.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019,
    arXiv:1909.08593), section 2.2, and its code, lm-human-preferences.
    """

    _kind = "adaptive"
    _rule = staticmethod(rules.adaptive)
    _needs_n_steps = True
    _paced_by = "horizon"
    horizon: float
    clip: float

    def __init__(
        self,
        init_kl_coef: float,
        target: float,
        horizon: float = 10_000,
        *,
        clip: float = 0.2,
        unit: Unit = "sequence",
        min_coef: float = 1e-6,
        max_coef: float | None = None,
        **options: Unpack[TargetOptions],
    ) -> None:
        super().__init__(target, unit, min_coef, max_coef, **options)
        self._set(above=0, horizon=horizon, clip=clip)
        self._begin("init_kl_coef", init_kl_coef)

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
        init_kl_coef: the first coefficient, within the bounds.
        target: the KL to hold, > 0, in nats per ``unit``.
        gain: > 0; the change of ``log(value)`` per nat and update.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"token"`` (over all tokens) or
            ``"sequence"`` (of the sums over each sequence).
        min_coef: the lower bound, > 0.
        max_coef: the upper bound, >= ``min_coef``. None: 1,000 times ``init_kl_coef``. ``math.inf``
            for none.
        **options: ``device``, ``process_group``, ``dead_band``, ``ema`` and ``floor``, of every
            controller with a target: see :class:`klfast.controllers.base.TargetController`.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: klfast's own. It is dual ascent (:class:`klfast.DualKLController`) with the error in
    nats, not in units of the target.
    """

    _kind = "exponential"
    _rule = staticmethod(rules.exponential)
    _paced_by = "gain"
    gain: float

    def __init__(
        self,
        init_kl_coef: float = 0.1,
        target: float = 0.1,
        *,
        gain: float = 0.1,
        unit: Unit = "token",
        min_coef: float = 1e-4,
        max_coef: float | None = 10.0,
        **options: Unpack[TargetOptions],
    ) -> None:
        super().__init__(target, unit, min_coef, max_coef, **options)
        self._set(above=0, gain=gain)
        self._begin("init_kl_coef", init_kl_coef)


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
    """Raise unless all options of a factory are known, and those of a target come with one."""
    for option in options:
        if option not in ADAPTIVE_OPTIONS:
            expected = ", ".join(map(repr, ADAPTIVE_OPTIONS))
            raise TypeError(f"unknown option {option!r}; expected one of {expected}")
    of_target = [option for option in options if option not in FIXED_OPTIONS]
    if target is None and of_target:
        raise TypeError(f"target must be a number when {', '.join(of_target)} is given, got None")
