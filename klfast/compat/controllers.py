"""The frameworks' controllers: klfast's own, under the names and argument names they use.

One rule is behind all of them (Ziegler et al. 2019, section 2.2). Inside the bounds klfast's is the
published one bit for bit. What differs: a NaN KL is skipped instead of kept for ever, the
coefficient neither reaches 0 nor turns negative (``min_coef=1e-6``), ``target`` and ``horizon``
must be > 0, the value stays a Python float whatever ``current`` is and is not set from outside
(``load_state_dict`` does that), ``n_steps`` is an integer, and there is a ``state_dict`` for the
checkpoint. ``update`` returns the new value, where theirs return None.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from klfast.checks import check_number
from klfast.controllers import AdaptiveKLController, FixedKLController
from klfast.stats import KLStats


class TokenAdaptiveKLController(AdaptiveKLController):
    """``AdaptiveKLController`` whose target is in nats per token, as ROLL and verl measure it."""

    def __init__(
        self, init_kl_coef: float, target: float, horizon: float = 10_000, **options: Any
    ) -> None:
        super().__init__(init_kl_coef, target, horizon, **{"unit": "token", **options})


class VerlAdaptiveKLController(TokenAdaptiveKLController):
    """verl's ``AdaptiveKLController(init_kl_coef, target_kl, horizon)``."""

    def __init__(
        self, init_kl_coef: float, target_kl: float, horizon: float, **options: Any
    ) -> None:
        check_number("target_kl", target_kl, above=0)
        super().__init__(init_kl_coef, target_kl, horizon, **options)

    def update(  # verl's name of the first argument
        self, current_kl: float | Tensor | KLStats, n_steps: int | None = None
    ) -> float:
        """As ``klfast.AdaptiveKLController.update``."""
        return super().update(current_kl, n_steps)


class VerlFixedKLController(FixedKLController):
    """verl's ``FixedKLController(kl_coef)``."""

    def update(  # verl's name of the first argument
        self, current_kl: float | Tensor | KLStats, n_steps: int | None = None
    ) -> float:
        """As ``klfast.FixedKLController.update``: the coefficient stays."""
        return super().update(current_kl, n_steps)
