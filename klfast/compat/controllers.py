"""The frameworks' controllers: klfast's own, under the names and argument names they use.

All of them use one controller (Ziegler et al. 2019, section 2.2). Inside the bounds klfast's is the
published one bit for bit. As with the frameworks' own, the first coefficient may be 0, and
``n_steps`` may be a whole float. What differs:

- a NaN KL is skipped instead of kept for ever;
- the coefficient neither falls to 0 nor turns negative (``min_coef=1e-6``, which is also the least
  first coefficient that is not 0);
- a coefficient of 0 is warned of, once per controller, because it stays 0 whatever the KL is;
- ``target`` and ``horizon`` must be > 0, ``n_steps`` must be whole (8.0, not 8.5) and >= 0;
- the value stays a Python float whatever ``current`` is, and is not set from outside
  (``load_state_dict`` does that);
- there is a ``state_dict`` for the checkpoint;
- ``update`` returns the new value, where theirs return None.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from klfast.args.checks import check_number
from klfast.controllers import CONTROLLERS, rules
from klfast.controllers import target as own
from klfast.controllers.base import CoefficientController, warn_caller
from klfast.controllers.inputs import KLName, to_scalar
from klfast.stats.kl import KLStats


class _WholeSteps(CoefficientController):
    """A controller whose ``n_steps`` may be a whole float, as in the frameworks."""

    def _check_n_steps(self, n_steps: object) -> int:
        # The frameworks take a float, as a division gives it.
        number = to_scalar(n_steps)
        whole = isinstance(number, float) and number.is_integer()
        return super()._check_n_steps(int(number) if whole else n_steps)


class FixedKLController(_WholeSteps, own.FixedKLController):
    """``klfast.FixedKLController``; ``n_steps`` of ``update`` may be a whole float."""


class AdaptiveKLController(_WholeSteps, own.AdaptiveKLController):
    """``klfast.AdaptiveKLController`` that may start from 0.

    The controller multiplies, so a coefficient of 0 is absorbing. It stays 0 for any KL and any
    ``min_coef``, and each controller warns of it once. ``n_steps`` of ``update`` may be a whole
    float.

    It takes the arguments of ``klfast.AdaptiveKLController``. ``init_kl_coef`` may be 0, and
    without ``max_coef`` there is no upper bound, as in the frameworks.
    """

    _limit = staticmethod(rules.bounded_or_absorbed)
    _warned_of_0 = False

    def __init__(
        self, init_kl_coef: float, target: float, horizon: float = 10_000, **options: Any
    ) -> None:
        if options.get("max_coef") is None:
            # The frameworks have no upper bound, and a run must take the same steps.
            options["max_coef"] = math.inf
        super().__init__(init_kl_coef, target, horizon, **options)
        self._warn_of_0()

    def _check_value(self, argument: str, value: object) -> float:
        # klfast's own refuses 0, which the published rule never leaves.
        if check_number(argument, value, least=0) == 0:
            return 0.0
        return super()._check_value(argument, value)

    def _warn_of_0(self) -> None:
        if self._warned_of_0 or self._state["value"]:
            return
        self._warned_of_0 = True
        warn_caller(
            f"{type(self).__name__} has a coefficient of 0, which is absorbing: the rule "
            "multiplies it, so it stays 0 whatever the KL is"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As ``klfast.AdaptiveKLController.load_state_dict``; the coefficient may be 0."""
        super().load_state_dict(state)
        self._warn_of_0()


class TokenAdaptiveKLController(AdaptiveKLController):
    """``AdaptiveKLController`` whose target is in nats per token, as ROLL and verl measure it."""

    def __init__(
        self, init_kl_coef: float, target: float, horizon: float = 10_000, **options: Any
    ) -> None:
        super().__init__(init_kl_coef, target, horizon, **{"unit": "token", **options})


class _VerlUpdate(_WholeSteps):
    """A controller whose ``update`` has verl's name for its first argument."""

    def update(
        self,
        current_kl: float | Tensor | KLStats,
        n_steps: int | Tensor | None = None,
        *,
        kl: KLName = "kl",
    ) -> Any:
        """As of ``klfast``'s controller; ``n_steps`` may be a whole float."""
        return super().update(current_kl, n_steps, kl=kl)


class VerlAdaptiveKLController(_VerlUpdate, TokenAdaptiveKLController):
    """verl's ``AdaptiveKLController(init_kl_coef, target_kl, horizon)``."""

    def __init__(
        self, init_kl_coef: float, target_kl: float, horizon: float, **options: Any
    ) -> None:
        # The error names verl's argument, which the base class calls ``target``.
        check_number("target_kl", target_kl, above=0)
        super().__init__(init_kl_coef, target_kl, horizon, **options)


class VerlFixedKLController(_VerlUpdate, FixedKLController):
    """verl's ``FixedKLController(kl_coef)``."""


def _of_verl(rule: type[CoefficientController]) -> type[CoefficientController]:
    made = type(f"Verl{rule.__name__}", (_VerlUpdate, rule), {"__module__": __name__})
    globals()[made.__name__] = made  # where pickle looks for it
    return made


VERL_RULES = {kind: _of_verl(rule) for kind, rule in CONTROLLERS.items() if kind != "adaptive"}
"""The controllers that verl itself does not have, by the name of their state's kind."""


def get_kl_controller(
    init_kl_coef: float, target: float | None = None, horizon: float = 10_000, **options: Any
) -> FixedKLController | AdaptiveKLController:
    """As ``klfast.get_kl_controller``, of this module's controllers."""
    own.check_options(target, options)
    if target is None:
        return FixedKLController(init_kl_coef, **options)
    return AdaptiveKLController(init_kl_coef, target, horizon, **options)
