"""Monitors: say when the KL has left its target, or will soon pass a limit."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from klfast.checks.arguments import check_number
from klfast.controllers.current import KLName, Unit, check_count
from klfast.controllers.reading import KLReader
from klfast.transfer import json_of, numbers_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from klfast.stats import KLStats

__all__ = ["KLDriftAlarm", "KLMonitor"]

Status = Literal["ok", "high", "low"]
Drift = Literal["ok", "drifting", "over"]
S = TypeVar("S", bound=str)

_FIRST = 20
"""The most values that a ``KLMonitor`` waits for by default."""

_REMEDIES = {
    "high": "raise the coefficient or lower the learning rate, and check that the tokens were "
    "sampled from the policy that trains",
    "low": "lower the coefficient, or the target if the reward is good; check that the policy "
    "trains at all, and that the target is in this unit",
}


class _Window(KLReader, Generic[S]):
    """The last KLs, and a status that follows from them; each change for the worse warns.

    With ``process_group=`` the group's rank 0 warns.
    """

    _output = "status"
    _changed_in_place = ("_values",)
    min_updates: int = 1

    def _watch(self, window: object) -> None:
        """Begin with an empty window."""
        self.window = check_count("window", window, least=1)
        self._values: deque[float] = deque(maxlen=self.window)
        self._status: Any = "ok"

    @property
    def status(self) -> S:
        """The result of the last ``update``; ``"ok"`` before the first."""
        status: S = self._status
        return status

    def update(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | None = None,
        *,
        kl: KLName = "kl",
    ) -> S:
        """Take the KL of a batch into the window.

        Args:
            current: the batch's mean KL in nats: a number, a 0-dim tensor, or a ``KLStats``, whose
                mean is taken by ``unit``. inf makes the window's mean infinite until it has left
                the window. NaN or -inf changes nothing: it is counted in ``skipped`` and warned of
                once. So is a ``KLStats`` that keeps no token, which has no mean.
            n_steps: with ``process_group=``, the weight of this rank's number in the mean of all
                ranks; 1 by default, 0 on a rank without data.
            kl: which sums of a ``KLStats`` to go by, as of a controller's ``update``.

        Returns:
            The status.

        Raises:
            TypeError: ``current`` is not a number, or ``n_steps`` not an integer.
            ValueError: ``n_steps`` is negative or beyond float64, or ``kl`` is unknown or not in
                ``current``.
            RuntimeError: the ranks have different windows, or a rank has died.
        """
        if n_steps is not None:
            n_steps = check_count("n_steps", n_steps, least=0)
        means = self._measure(current, n_steps, kl=kl)
        if means is not None:
            self._values.append(means.kl)
            before, self._status = self._status, self._judged()
            if self._status not in ("ok", before):
                self._warn(self._warning())
            if len(self._values) >= self.min_updates:
                self._ask_unit(means, self.target)
        return self.status

    def _judged(self) -> Any:
        """The status, ``"ok"`` while there are too few values, of which none is infinite."""
        is_known = len(self._values) >= self.min_updates or math.inf in self._values
        return self._judge() if is_known else "ok"

    @abstractmethod
    def _judge(self) -> S:
        """The status of the values."""

    @abstractmethod
    def _warning(self) -> str:
        """The warning of a change into the present status."""

    def state_dict(self) -> dict[str, Any]:
        """Return the window's values and the count of skipped ones, as plain JSON.

        A KL of inf is the string ``"inf"``. The state also has ``unit``, and the ``target`` of a
        ``KLMonitor``.
        """
        return self._framed(self._content())

    def _content(self) -> dict[str, Any]:
        return {"values": [*map(json_of, self._values)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` returned; the settings stay those of this object.

        The status follows from the values, without a warning; a smaller window keeps the last ones.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` is of another kind, version or unit, lacks a key or has an unknown
                one, or a value is NaN or -inf. The object is then unchanged.
        """
        skipped = self._check_state_frame(state)
        values = numbers_of("state['values']", state["values"], besides=("inf",))
        self._values = deque(values, maxlen=self.window)
        self._skipped = skipped
        self._status = self._judged()


class KLMonitor(_Window[Status]):
    """Watches the mean of the last KLs and warns when it leaves the band around the target.

    m is the mean of the last ``window`` values, or of all while there are fewer. The status is
    ``"high"`` if ``m > high * target``, ``"low"`` if ``m < low * target``, else ``"ok"``. Before
    there are ``min_updates`` values it is ``"ok"``, as every run begins with a low KL. A KL of inf
    is ``"high"`` at once, and as long as it is in the window. Each change into ``"high"`` or
    ``"low"`` gives one ``RuntimeWarning``, which says what to do.

    Args:
        target: the KL to hold, > 0, in nats per ``unit``.
        window: the number of values in the mean, >= 1.
        high: the upper edge of the band, in targets; > ``low``.
        low: the lower edge of the band, in targets; >= 0.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"sequence"`` (of the sums over
            each sequence) or ``"token"`` (over all tokens). A target that seems to be in the other
            one is warned of once, as by a controller's ``update``.
        process_group: the ranks that measure together, each of which must call ``update``; None for
            this process alone.
        min_updates: the number of values before which the status is ``"ok"``, >= 1 and <=
            ``window``. None: the smaller of 20 and ``window``.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.
    """

    _kind = "monitor"
    target: float

    def __init__(
        self,
        target: float,
        *,
        window: int = 100,
        high: float = 2.0,
        low: float = 0.5,
        unit: Unit = "sequence",
        process_group: ProcessGroup | None = None,
        min_updates: int | None = None,
    ) -> None:
        super().__init__(unit, process_group)
        self.target = check_number("target", target, above=0)
        self._watch(window)
        self.low = check_number("low", low, least=0)
        self.high = check_number("high", high, above=self.low)
        if min_updates is None:
            min_updates = min(_FIRST, self.window)
        self.min_updates = check_count("min_updates", min_updates, least=1)
        if self.min_updates > self.window:
            raise ValueError(f"min_updates must be <= window={self.window}, got {min_updates!r}")

    def _judge(self) -> Status:
        mean = statistics.mean(self._values)  # rounded once, so exact at the band's edges
        if mean > self.high * self.target:
            return "high"
        return "low" if mean < self.low * self.target else "ok"

    def _warning(self) -> str:
        return (
            f"mean KL of the last {len(self._values)} updates is {self._status}: "
            f"{statistics.mean(self._values):.4g} nats per {self.unit}, target {self.target:.4g}; "
            f"{_REMEDIES[self._status]}"
        )


class KLDriftAlarm(_Window[Drift]):
    """Warns that the KL passes a limit, or soon will, whether or not anything holds it.

    Where the coefficient is 0 the KL is still measured (``coef=0.0, return_stats=True``), and how
    far a policy has gone from its reference tells how much it has forgotten of it. With m the mean
    of the last ``window`` values:

    - ``"over"`` if ``m > limit``;
    - ``"drifting"`` if the least-squares line through the values passes ``limit`` within ``ahead``
      updates, also with a slope smaller by two of its standard errors; this needs a full window of
      at least 8 values;
    - else ``"ok"``. Each change into one of the first two gives one ``RuntimeWarning``.

    Args:
        limit: the KL not to pass, > 0, in nats per ``unit``.
        window: the number of values that are looked at, >= 1.
        ahead: updates, >= 0; 0 says ``"over"`` alone.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"sequence"`` (of the sums over
            each sequence) or ``"token"`` (over all tokens).
        process_group: the ranks that measure together, each of which must call ``update``; None for
            this process alone.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, or ``unit`` is unknown.

    Source: I. Shenfeld et al., "RL's Razor: Why Online Reinforcement Learning Forgets Less" (2025,
    arXiv:2509.04259), on KL and forgetting.
    """

    _kind = "drift"

    def __init__(
        self,
        limit: float,
        *,
        window: int = 50,
        ahead: int = 50,
        unit: Unit = "sequence",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(unit, process_group)
        self.limit = check_number("limit", limit, above=0)
        self._watch(window)
        self.ahead = check_count("ahead", ahead, least=0)

    def _judge(self) -> Drift:
        if statistics.mean(self._values) > self.limit:
            return "over"
        return "drifting" if self._passes_ahead() else "ok"

    def _passes_ahead(self) -> bool:
        count = len(self._values)
        if not self.ahead or count < max(self.window, _ENOUGH):
            return False
        slope, error, end = _line(self._values)
        least = slope - 2 * error
        return least > 0 and end + least * self.ahead > self.limit

    def _warning(self) -> str:
        mean = statistics.mean(self._values)
        where = f"{mean:.4g} nats per {self.unit} over the last {len(self._values)} updates"
        if self._status == "over":
            return f"KL is over its limit of {self.limit:.4g}: {where}"
        slope, _, _ = _line(self._values)
        return (
            f"KL is drifting towards its limit of {self.limit:.4g}: {where}, and {slope:+.2g} an "
            "update"
        )


_ENOUGH = 8


def _line(values: Collection[float]) -> tuple[float, float, float]:
    """The least-squares line through values at 0, 1, ...: slope, its standard error, last point.

    Values are scaled by a power of 2, lest their squares be beyond float64.
    """
    count = len(values)
    scale = math.ldexp(1.0, math.frexp(max(map(abs, values)))[1] - 1)
    scaled = [value / scale for value in values]
    slope, intercept = statistics.linear_regression(range(count), scaled)
    rest = sum((value - intercept - slope * i) ** 2 for i, value in enumerate(scaled))
    error = math.sqrt(rest / (count - 2) / (count * (count * count - 1) / 12))
    return scale * slope, scale * error, scale * (intercept + slope * (count - 1))
