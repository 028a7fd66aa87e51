"""The protocol of a controller, klfast's own or a user's."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["KLController"]


@runtime_checkable
class KLController(Protocol):
    """A controller with one coefficient: any object with these four members.

    It is taken as ``controller`` of :class:`klfast.KLPenalty` and :class:`klfast.KLLog`, as
    ``coef`` of :func:`klfast.kl_penalty`, :func:`klfast.kl_divergence` and :func:`klfast.reduce`,
    and as ``kl_coef`` of :func:`klfast.kl_rewards`. :class:`klfast.GroupedKLController` takes a
    class of them, and makes its objects as ``controller(init_kl_coef, target, **options)``. ::

        class Halving:
            def __init__(self, init_kl_coef, target):
                self.value, self.target = init_kl_coef, target

            def update(self, current):  # the batch's KLStats
                kl = current.token_mean().item()
                self.value *= 0.5 if kl < self.target else 1.0

            def state_dict(self):
                return {"value": self.value}

            def load_state_dict(self, state):
                self.value = state["value"]

    What klfast's controllers have beside them is used where it is there: ``skipped`` is logged;
    statistics are brought to ``device``; ``unit`` is compared with that of ``KLPenalty``; a
    controller with a ``process_group`` adds up the ranks' KL itself, where others are given the
    statistics of all ranks by ``KLPenalty.step``.

    Units: those of the statistics, nats per sequence; the coefficient has none.

    Source: klfast's own.
    """

    @property
    def value(self) -> Any:
        """The coefficient, a number, or a 0-dim tensor that is updated in place."""

    def update(self, current: Any, /) -> Any:
        """Move the coefficient after a batch; ``current`` is its ``KLStats`` or mean KL in nats."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the ``state`` that ``state_dict`` returned."""
