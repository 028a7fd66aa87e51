"""Watchers: what else follows from the KL of a batch, beside the coefficient.

A stop of the epochs over a batch, an alarm, a reset of the reference, and a learning rate.
"""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from klfast.args.checks import check_number
from klfast.controllers.base import Field, KLReader, count_field
from klfast.controllers.diagnosis import Means
from klfast.controllers.inputs import NUMBER, KLName, Unit, check_count, number_of
from klfast.stats.kl import KLStats
from klfast.stats.transfer import json_of, numbers_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

Status = Literal["ok", "high", "low"]
Drift = Literal["ok", "drifting", "over"]
Reason = Literal["interval", "budget", "plateau"]
R = TypeVar("R")

_FIRST = 20  # the most values that a ``KLMonitor`` waits for by default
_ENOUGH = 8  # the fewest values that ``KLDriftAlarm`` lays a line through
_REMEDIES = {
    "high": "raise the coefficient or lower the learning rate, and check that the tokens were "
    "sampled from the policy that trains; klfast.worst_tokens shows the tokens that cause it",
    "low": "lower the coefficient, or the target if the reward is good; check that the policy "
    "trains at all, and that the target is in this unit",
}


class _Watcher(KLReader, Generic[R]):
    """A watcher that goes by the KL alone."""

    def update(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | None = None,
        *,
        kl: KLName = "kl",
    ) -> R:
        """Take the KL of a batch, and say what follows from it.

        With ``process_group=`` every rank must call it, and all get the same result.

        Args:
            current: the KL, as of a controller's ``update``. inf is above every limit. NaN, -inf or
                a ``KLStats`` that keeps no token changes nothing: it is counted in ``skipped`` and
                warned of once.
            n_steps: with ``process_group=``, the weight of this rank's number in the mean of all
                ranks; 1 by default, 0 on a rank without data.
            kl: which sums of a ``KLStats`` to go by, as of a controller's ``update``.

        Returns:
            ``KLEarlyStop``: whether to end the epochs over this batch. Others: the status.

        Raises:
            TypeError: ``current`` is not a number, or ``n_steps`` not an integer.
            ValueError: ``n_steps`` is negative or beyond float64, or ``kl`` is unknown or not in
                ``current``.
            RuntimeError: the ranks have different states, before anything is done; or a rank has
                died.
        """
        means = self._measure(current, n_steps, kl)
        # Also for a KL that is skipped, so that the caller gets the status.
        result = self._judge(means)
        if means is not None and isinstance(current, KLStats):
            self._ask_sign(self._judged(means))
        return result

    def _judged(self, means: Means) -> float:
        """The KL that a result went by, of which chance no longer decides the sign."""
        return means.kl

    @abstractmethod
    def _judge(self, means: Means | None) -> R:
        """The result of a batch. None, for a KL that is skipped, changes nothing."""


class KLEarlyStop(_Watcher[bool]):
    """Says when to end PPO's epochs over a batch: once ``current > factor * target``.

    ``current`` is the KL between the policy that sampled the batch and the policy as it is now::

        for epoch in range(epochs):
            stats = train_on(batch)  # of kl_penalty(logprobs, old_logprobs, estimator="k3_ref")
            if stop.update(stats):
                break

    The older policy sampled the tokens, so use statistics of ``"k3_ref"``, which estimate KL(old ||
    new). With the log-ratio new - old, k1 has the opposite sign: its mean is -KL(old || new), and
    never stops an epoch. Statistics with a negative KL give a hint once.

    Args:
        target: the KL to stay near, > 0, in nats per ``unit``.
        factor: > 0.
        unit, process_group: see :class:`klfast.KLMonitor`. All ranks stop together.

    Raises:
        TypeError, ValueError: as :class:`klfast.KLMonitor`.

    Source: J. Achiam, "Spinning Up in Deep RL" (2018), PPO's ``target_kl``, with its factor of 1.5.
    """

    _kind = "early-stop"
    _output = "stops"
    _saved = (count_field("stops"),)
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

    def _judge(self, means: Means | None) -> bool:
        if means is None:
            return False
        stops = means.kl > self.factor * self.target
        self._stops += stops
        self._ask_unit(means, self.target)
        return stops


class _Window(_Watcher[R]):
    """The last KLs, and a status that follows from them; each change for the worse warns."""

    _output = "status"
    _saved = (
        Field(
            "values",
            "_values",
            lambda self, name, values: numbers_of(name, values, ("inf",))[-self.window :],
            lambda values: [*map(json_of, values)],
        ),
    )
    window: int
    min_updates: int = 1
    _values: Sequence[float] = ()
    _status: Any = "ok"

    @property
    def status(self) -> R:
        """The result of the last ``update``; ``"ok"`` before the first."""
        status: R = self._status
        return status

    def _judge(self, means: Means | None) -> R:
        if means is not None:
            self._values = [*self._values, means.kl][-self.window :]
            before = self._status
            self._set_status()
            # A status that stays is no news.
            if self._status not in ("ok", before):
                self._warn(self._warning())
            if len(self._values) >= self.min_updates:
                self._ask_unit(means, self.target)
        return self.status

    def _judged(self, means: Means) -> float:
        # k1 of few tokens is negative by chance.
        is_enough = len(self._values) >= min(_FIRST, self.window)
        return statistics.mean(self._values) if is_enough else 0.0

    def _set_status(self) -> None:
        """Set the status, ``"ok"`` while there are too few values, of which none is infinite."""
        # An infinite KL is over every limit, however few values there are.
        is_known = len(self._values) >= self.min_updates or math.inf in self._values
        self._status = self._status_of_values() if is_known else "ok"

    @abstractmethod
    def _status_of_values(self) -> R:
        """The status of the values."""

    @abstractmethod
    def _warning(self) -> str:
        """The warning of a change into the present status."""

    def _restore(self, attributes: dict[str, Any]) -> None:
        super()._restore(attributes)
        self._set_status()


class KLMonitor(_Window[Status]):
    """Watches the mean of the last KLs and warns when it leaves the band around the target.

    m is the mean of the last ``window`` values, or of all while there are fewer. The status is
    ``"high"`` if ``m > high * target``, ``"low"`` if ``m < low * target``, else ``"ok"``. Before
    there are ``min_updates`` values it is ``"ok"``, as every run begins with a low KL. A KL of inf
    is ``"high"`` at once, and as long as it is in the window. Each change into ``"high"`` or
    ``"low"`` gives one ``RuntimeWarning``, which says what to do.

    k1 and k3 estimate the KL from tokens of the policy that trains, and ``"k3_ref"`` from tokens of
    the reference. A full window (or 20 values) of statistics with a negative mean gives a hint
    once.

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
        self.window = check_count("window", window, least=1)
        self.low = check_number("low", low, least=0)
        self.high = check_number("high", high, above=self.low)
        if min_updates is None:
            min_updates = min(_FIRST, self.window)
        self.min_updates = check_count("min_updates", min_updates, least=1)
        if self.min_updates > self.window:
            raise ValueError(f"min_updates must be <= window={self.window}, got {min_updates!r}")

    def _status_of_values(self) -> Status:
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

    You can measure the KL with a coefficient of 0 too (``coef=0.0, return_stats=True``). The
    policy's distance from its reference tells how much it has forgotten of it. With m the mean of
    the last ``window`` values:

    - ``"over"`` if ``m > limit``.
    - ``"drifting"`` if the least-squares line through the values passes ``limit`` within ``ahead``
      updates, also with a slope smaller by two of its standard errors. This needs a full window of
      at least 8 values.
    - ``"ok"`` otherwise. Each change to ``"over"`` or ``"drifting"`` gives one ``RuntimeWarning``.

    :class:`klfast.KLMonitor` says which estimator fits which tokens.

    Args:
        limit: the KL not to pass, > 0, in nats per ``unit``.
        window: the number of values that are looked at, >= 1.
        ahead: updates, >= 0; 0 says ``"over"`` alone.
        unit, process_group: see :class:`klfast.KLMonitor`.

    Raises:
        TypeError, ValueError: as :class:`klfast.KLMonitor`.

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
        self.window = check_count("window", window, least=1)
        self.ahead = check_count("ahead", ahead, least=0)

    def _status_of_values(self) -> Drift:
        if statistics.mean(self._values) > self.limit:
            return "over"
        if not self.ahead or len(self._values) < max(self.window, _ENOUGH):
            return "ok"
        slope, error, end = _line(self._values)
        # Two standard errors, so that noise around a level line gives no warning.
        least = slope - 2 * error
        return "drifting" if least > 0 and end + least * self.ahead > self.limit else "ok"

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


def _line(values: Sequence[float]) -> tuple[float, float, float]:
    """The least-squares line through values at 0, 1, ...: slope, its standard error, last point."""
    count = len(values)
    # A power of 2, lest the squares be beyond float64.
    scale = math.ldexp(1.0, math.frexp(max(map(abs, values)))[1] - 1)
    scaled = [value / scale for value in values]
    slope, intercept = statistics.linear_regression(range(count), scaled)
    rest = sum((value - intercept - slope * i) ** 2 for i, value in enumerate(scaled))
    error = math.sqrt(rest / (count - 2) / (count * (count * count - 1) / 12))
    return scale * slope, scale * error, scale * (intercept + slope * (count - 1))


class ReferenceReset(KLReader):
    """Calls back when the reference should become the policy, which leaves a KL of 0 to spend.

    A reset is due, in this order,

    - ``"interval"``: ``interval`` updates after the last one;
    - ``"budget"``: when the KL has been above ``budget`` in ``patience`` updates in a row;
    - ``"plateau"``: when ``metric`` has not risen by more than ``min_delta`` above its best since
      the last reset in ``plateau`` updates.

    The callback does the reset (copy the policy's weights, average them, clear the optimizer).

    Args:
        callback: called with the reason when a reset is due, before ``update`` returns; None for
            none.
        interval: updates, >= 1; None for never.
        budget: nats per ``unit``, > 0; None for never.
        plateau: updates, >= 1; None for never.
        patience: updates, >= 1, of the budget.
        min_delta: >= 0, of the plateau.
        unit, process_group: see :class:`klfast.KLMonitor`. All ranks reset together.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: no trigger is given, a setting is out of its range, or ``unit`` is unknown.

    Sources: M. Liu et al., "ProRL" (2025, arXiv:2505.24864), section 2.3.2, resets reference and
    optimizer when the validation reward stalls, without numbers; A. Gorbatovski et al., "Learn Your
    Reference Model for Real Good Alignment" (2024, arXiv:2404.09656), at an interval.
    """

    _kind = "reference-reset"
    _output = "resets"
    _saved = (
        *map(count_field, ("resets", "updates", "above", "stalled")),
        Field(
            "best",
            "_best",
            lambda _, name, best: None if best is None else check_number(name, best),
        ),
    )

    def __init__(
        self,
        callback: Callable[[Reason], object] | None = None,
        *,
        interval: int | None = None,
        budget: float | None = None,
        plateau: int | None = None,
        patience: int = 1,
        min_delta: float = 0.0,
        unit: Unit = "sequence",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(unit, process_group)
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable or None, got {callback!r}")
        if interval is None and budget is None and plateau is None:
            raise ValueError("one of interval, budget, plateau must be given, got none")
        self._callback = callback
        self.interval = None if interval is None else check_count("interval", interval, least=1)
        self.budget = None if budget is None else check_number("budget", budget, above=0)
        self.plateau = None if plateau is None else check_count("plateau", plateau, least=1)
        self.patience = check_count("patience", patience, least=1)
        self.min_delta = check_number("min_delta", min_delta, least=0)
        self._resets = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._updates = self._above = self._stalled = 0
        self._best: float | None = None

    @property
    def resets(self) -> int:
        """How many resets have been due."""
        return self._resets

    def update(
        self,
        current: float | Tensor | KLStats,
        metric: float | Tensor | None = None,
        n_steps: int | None = None,
        *,
        kl: KLName = "kl",
    ) -> Reason | None:
        """Take a batch's KL and metric; the reason of a reset, None while none is due.

        ``metric`` is what should rise, such as a validation reward, and the same on every rank.
        None says nothing of the plateau, and neither does NaN or inf. ``update`` of
        :class:`klfast.KLMonitor` describes ``current``, ``n_steps``, ``kl`` and the errors.
        """
        # Before anything is counted, so that an error leaves the object as it is.
        score = None if metric is None else number_of(metric, "metric", NUMBER)
        means = self._measure(current, n_steps, kl, score)
        if means is None:
            return None
        self._updates += 1
        is_above = self.budget is not None and means.kl > self.budget
        self._above = self._above + 1 if is_above else 0
        # A NaN compares with nothing, and would become the best for good.
        if score is not None and math.isfinite(score):
            if self._best is None or score > self._best + self.min_delta:
                self._best, self._stalled = score, 0
            else:
                self._stalled += 1
        reason: Reason
        if self.interval is not None and self._updates >= self.interval:
            reason = "interval"
        elif self.budget is not None and self._above >= self.patience:
            reason = "budget"
        elif self.plateau is not None and self._stalled >= self.plateau:
            reason = "plateau"
        else:
            return None
        self._resets += 1
        # Before the callback: if it raises, the same reset is not due again.
        self._begin_anew()
        if self._callback is not None:
            self._callback(reason)
        return reason


class KLAdaptiveLR(KLReader, LRScheduler):
    """A learning-rate scheduler that is stepped with the KL of the policy's last update.

    ``lr /= factor`` if ``current > high * target``, ``lr *= factor`` if
    ``0 < current < low * target``, limited to ``[min_lr, max_lr]``; every parameter group likewise.
    A KL that is too high never raises a rate, and one that is too low never lowers it.
    ``current`` is the KL between the policy before the update and after it. It is stepped like
    ``torch.optim.lr_scheduler.ReduceLROnPlateau``: ``scheduler.step(stats)``. The tokens are of the
    policy before the update, so use statistics of ``"k3_ref"``, as for :class:`klfast.KLEarlyStop`.
    k1 is negative for such tokens and moves no rate, which gives a hint once.

    Args:
        optimizer: whose learning rates, numbers or tensors, are moved in place.
        target: the KL of an update to hold, > 0, in nats per ``unit``.
        factor: > 1.
        high, low: the band's edges, in targets, with ``0 <= low < high``.
        min_lr, max_lr: the bounds, ``0 < min_lr <= max_lr``, between which the first learning rates
            must be. None: a hundredth and ten times each group's first learning rate, which are the
            source's bounds for its 1e-3.
        unit, process_group: see :class:`klfast.KLMonitor`. Every rank must call ``step``.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, ``unit`` is unknown, or a first
            learning rate is outside the bounds.

    Source: N. Rudin et al., "Learning to Walk in Minutes Using Massively Parallel Deep
    Reinforcement Learning" (CoRL 2021, arXiv:2109.11978), and its code, rsl_rl, whose numbers are
    the defaults; skrl and rl_games have the same rule.
    """

    _kind = "adaptive-lr"
    _output = "last_lr"
    _shown = ("target", "factor", "high", "low", "min_lr", "max_lr", "unit")
    _saved = (
        count_field("steps", "last_epoch"),
        Field(
            "lr",
            "_last_lr",
            lambda self, _, rates: self._check_rates(rates),
            lambda rates: [*map(float, rates)],
        ),
    )
    target: float

    def __init__(
        self,
        optimizer: Optimizer,
        target: float,
        *,
        factor: float = 1.5,
        high: float = 2.0,
        low: float = 0.5,
        min_lr: float | None = None,
        max_lr: float | None = None,
        unit: Unit = "token",
        process_group: ProcessGroup | None = None,
    ) -> None:
        KLReader.__init__(self, unit, process_group)
        self.target = check_number("target", target, above=0)
        self.factor = check_number("factor", factor, above=1)
        self.low = check_number("low", low, least=0)
        self.high = check_number("high", high, above=self.low)
        self.min_lr = None if min_lr is None else check_number("min_lr", min_lr, above=0)
        self.max_lr = (
            None if max_lr is None else check_number("max_lr", max_lr, least=self.min_lr or 0)
        )
        # This calls ``step()`` without a KL, which moves no rate.
        LRScheduler.__init__(self, optimizer)
        for group in optimizer.param_groups:
            self._bounds_of(group)

    def _bounds_of(self, group: dict[str, Any]) -> tuple[float, float]:
        """The bounds of a parameter group, by its first learning rate."""
        # A scheduler keeps the first rate there, and a checkpoint of the optimizer has it.
        first = float(group.setdefault("initial_lr", float(group["lr"])))
        low = first / 100 if self.min_lr is None else self.min_lr
        high = first * 10 if self.max_lr is None else self.max_lr
        if not low <= first <= high:
            raise ValueError(
                f"min_lr and max_lr must be bounds around the optimizer's learning rate {first}, "
                f"got {low} and {high}"
            )
        return low, high

    def step(
        self,
        current: float | Tensor | KLStats | None = None,
        n_steps: int | None = None,
        *,
        kl: KLName = "kl",
    ) -> None:
        """Move the learning rates after an update of the policy, by the KL of that update.

        ``update`` of :class:`klfast.KLMonitor` describes ``current``, ``n_steps``, ``kl`` and the
        errors. Without a KL nothing moves.
        """
        means = None
        if current is not None:
            means = self._measure(current, n_steps, kl, self._rates())
            if means is not None and isinstance(current, KLStats):
                self._ask_sign(means.kl)
        is_high = means is not None and means.kl > self.high * self.target
        if is_high or (means is not None and 0 < means.kl < self.low * self.target):
            groups = self.optimizer.param_groups  # which may share one tensor
            # All bounds are checked before one rate moves.
            rates = [(group, float(group["lr"]), *self._bounds_of(group)) for group in groups]
            for group, before, low, high in rates:
                if is_high:
                    lr = min(before, max(before / self.factor, low))
                else:
                    lr = max(before, min(before * self.factor, high))
                if isinstance(group["lr"], Tensor):
                    # A captured graph reads this tensor.
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
        self.last_epoch += 1
        self._last_lr = self._rates()
        if means is not None:
            self._ask_unit(means, self.target)

    def _rates(self) -> list[Any]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def last_lr(self) -> list[float]:
        """The learning rates of the parameter groups after the last ``step``."""
        return [*map(float, self._last_lr)]

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates as they are."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def _check_rates(self, rates: object) -> list[float]:
        if not isinstance(rates, list):
            raise TypeError(f"state['lr'] must be a list, got {type(rates).__name__}")
        if len(rates) != len(self._last_lr):
            raise ValueError(
                f"state['lr'] must have {len(self._last_lr)} learning rates, got {len(rates)}"
            )
        return [check_number("state['lr']", rate, least=0) for rate in rates]
