"""A monitor: says when the KL has left the neighbourhood of its target."""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from klfast.checks.arguments import check_number
from klfast.control.reading import KLReader, Unit, check_count

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from klfast.stats import KLStats

__all__ = ["KLMonitor"]

Status = Literal["ok", "high", "low"]


class KLMonitor(KLReader):
    """Watches the mean of the last KLs and warns when it leaves the band around the target.

    With m the mean of the last ``window`` values (of those there are, while there are fewer), the
    status is ``"high"`` if ``m > high * target``, ``"low"`` if ``m < low * target``, else ``"ok"``.
    Each change into ``"high"`` or ``"low"`` gives one ``RuntimeWarning``.

    Args:
        target: the KL to hold, > 0, in nats per ``unit``.
        window: the number of values in the mean, >= 1.
        high: the upper edge of the band, in targets; > ``low``.
        low: the lower edge of the band, in targets; >= 0.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"sequence"`` (of the sums over
            each sequence) or ``"token"`` (over all tokens).
        process_group: the ranks that measure together, each of which must call ``update``; None for
            this process alone.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.
    """

    _kind = "monitor"
    _output = "status"

    def __init__(
        self,
        target: float,
        *,
        window: int = 100,
        high: float = 2.0,
        low: float = 0.5,
        unit: Unit = "sequence",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(unit, process_group)
        self.target = check_number("target", target, above=0)
        self.window = check_count("window", window, least=1)
        self.low = check_number("low", low, least=0)
        self.high = check_number("high", high, above=self.low)
        self._values: deque[float] = deque(maxlen=self.window)
        self._status: Status = "ok"

    @property
    def status(self) -> Status:
        """What the last ``update`` returned; ``"ok"`` before the first."""
        return self._status

    def update(self, current: float | Tensor | KLStats, n_steps: int | None = None) -> Status:
        """Take the KL of a batch into the window.

        Args:
            current: the batch's mean KL in nats: a number, a 0-dim tensor, or a ``KLStats``, whose
                mean is taken by ``unit``. NaN or inf changes nothing: it is counted in ``skipped``
                and warned of once. So is a ``KLStats`` that keeps no token, which has no mean.
            n_steps: with ``process_group=``, the weight of this rank's number in the mean of all
                ranks; 1 by default, 0 on a rank without data.

        Returns:
            The status: ``"ok"``, ``"high"`` or ``"low"``.

        Raises:
            TypeError: ``current`` is not a number, or ``n_steps`` not an integer.
            ValueError: ``n_steps`` is negative or beyond float64.
            RuntimeError: the ranks have different windows, or a rank has died.
        """
        if n_steps is not None:
            n_steps = check_count("n_steps", n_steps, least=0)
        kl = self._measure(current, n_steps, sum(self._values))
        if kl is not None:
            self._values.append(kl)
            before, self._status = self._status, self._judge()
            if self._status not in ("ok", before):
                warnings.warn(
                    f"mean KL of the last {len(self._values)} updates is {self._status}: "
                    f"{statistics.mean(self._values):.4g} nats per {self.unit}, "
                    f"target {self.target:.4g}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._status

    def _judge(self) -> Status:
        if not self._values:
            return "ok"
        mean = statistics.mean(self._values)  # rounded once, so exact at the band's edges
        if mean > self.high * self.target:
            return "high"
        return "low" if mean < self.low * self.target else "ok"

    def state_dict(self) -> dict[str, Any]:
        """Return the window's values and the count of skipped ones, as plain JSON; no settings."""
        return self._framed(self._content())

    def _content(self) -> dict[str, Any]:
        return {"values": list(self._values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` returned; the settings stay those of this object.

        The status follows from the values, without a warning; a smaller window keeps the last ones.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` is of another kind or version, lacks a key or has an unknown one,
                or a value is not finite. The object is then unchanged.
        """
        skipped = self._check_state_frame(state)
        if not isinstance(state["values"], list):
            raise TypeError(f"state['values'] must be a list, got {type(state['values']).__name__}")
        values = [check_number("state['values']", value) for value in state["values"]]
        self._values = deque(values, maxlen=self.window)
        self._skipped = skipped
        self._status = self._judge()
