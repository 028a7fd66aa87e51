"""Ending the epochs over one batch when the policy has moved far enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from klfast.checks.arguments import check_number
from klfast.controllers.current import KLName, Unit, check_count
from klfast.controllers.reading import KLReader
from klfast.stats import KLStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["KLEarlyStop"]


class KLEarlyStop(KLReader):
    """Says when to end PPO's epochs over a batch: once ``current > factor * target``.

    ``current`` is the KL between the policy that sampled the batch and the policy as it is now::

        for epoch in range(epochs):
            stats = train_on(batch)
            if stop.update(stats):
                break

    Args:
        target: the KL to stay near, > 0, in nats per ``unit``.
        factor: > 0.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"token"`` (over all tokens) or
            ``"sequence"`` (of the sums over each sequence). A target that seems to be in the other
            one is warned of once, as by a controller's ``update``.
        process_group: the ranks that measure together, and so stop together; each must call
            ``update``. None for this process alone.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: J. Achiam, "Spinning Up in Deep RL" (2018), PPO's ``target_kl``, with its factor of 1.5.
    """

    _kind = "early-stop"
    _output = "stops"
    target: float

    def __init__(
        self,
        target: float,
        *,
        factor: float = 1.5,
        unit: Unit = "token",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(unit, process_group)
        self.target = check_number("target", target, above=0)
        self.factor = check_number("factor", factor, above=0)
        self._stops = 0

    @property
    def stops(self) -> int:
        """How often ``update`` has said to stop."""
        return self._stops

    def update(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | None = None,
        *,
        kl: KLName = "kl",
    ) -> bool:
        """Whether to end the epochs over this batch.

        Args:
            current: the mean KL in nats: a number, a 0-dim tensor, or a ``KLStats``, whose mean is
                taken by ``unit``. inf stops. NaN or -inf does not stop: it is counted in
                ``skipped`` and warned of once. So is a ``KLStats`` that keeps no token.
            n_steps: with ``process_group=``, the weight of this rank's number in the mean of all
                ranks; 1 by default, 0 on a rank without data.
            kl: which sums of a ``KLStats`` to go by, as of a controller's ``update``.

        Raises:
            TypeError: ``current`` is not a number, or ``n_steps`` not an integer.
            ValueError: ``n_steps`` is negative or beyond float64, or ``kl`` is unknown or not in
                ``current``.
            RuntimeError: the ranks have stopped different numbers of times, or a rank has died.
        """
        if n_steps is not None:
            n_steps = check_count("n_steps", n_steps, least=0)
        means = self._measure(current, n_steps, kl=kl)
        if means is None:
            return False
        stops = means.kl > self.factor * self.target
        self._stops += stops
        self._ask_unit(means, self.target)
        return stops

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, as plain JSON; of the settings ``unit`` and ``target``."""
        return self._framed(self._content())

    def _content(self) -> dict[str, Any]:
        return {"stops": self._stops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` returned; the settings stay those of this object.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` is of another kind, version or unit, or lacks a key or has an
                unknown one. The object is then unchanged.
        """
        skipped = self._check_state_frame(state)
        self._stops = check_count("state['stops']", state["stops"], least=0)
        self._skipped = skipped
