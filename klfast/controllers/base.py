"""A coefficient inside its bounds, on the host or on a device, of one process or of many ranks."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
from torch import Tensor

from klfast.checks.arguments import check_number
from klfast.controllers import rules
from klfast.controllers.arithmetic import Floats, Number
from klfast.controllers.current import (
    KL_INPUT,
    KLName,
    Unit,
    check_count,
    check_scalar,
    chosen,
    mean_of,
    number_of,
    on_device,
    plain,
    row_of,
)
from klfast.controllers.device import DeviceState
from klfast.controllers.diagnosis import (
    Means,
    Stall,
    bound_warning,
    is_of_other_unit,
    stall_warning,
)
from klfast.controllers.measured import Measured
from klfast.controllers.reading import KLReader
from klfast.ranks import Ranks
from klfast.stats import KLStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MOST = 1_000.0
"""The default ``max_coef``, in first coefficients."""

_OF_OPTIONS = ("kl_ema", "measured")
"""The state of the option ``ema``; a checkpoint may lack it, or have it without the option."""


class CoefficientController(KLReader):
    """A coefficient inside its bounds, and the rule that moves it.

    ``update`` is for one thread at a time; any may read ``value`` meanwhile.

    A subclass keeps its settings as attributes, then calls ``_begin`` with the first coefficient.
    """

    _output = "value"
    _changed_in_place = ("_device_state", "_stall")
    _takes_infinity = False
    _rule: ClassVar[Any]  # a static rules.Rule
    _limit: ClassVar[Any] = staticmethod(rules.bounded)
    _needs_n_steps: bool = False
    _paced_by: ClassVar[str]  # the setting that says how fast the coefficient moves
    _stall: Stall | None = None
    _told_of_stall: bool = False
    min_coef: float = 0.0
    max_coef: float = math.inf
    floor: float | None = None
    ema: float = 0.0
    dead_band: float = 0.0
    _default_bound: float | None = None  # None where max_coef was given
    _value: float
    _memory: dict[str, float] | None = None
    _device_state: DeviceState | None = None

    def __init__(
        self,
        unit: Unit,
        device: str | torch.device | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(unit, process_group)
        self.device = None if device is None else check_torch_device(device)

    def __setattr__(self, name: str, value: object) -> None:
        if self._device_state is not None and not name.startswith("_"):
            raise AttributeError(
                f"{name} cannot be changed on a device; make another {type(self).__name__} and "
                "load this one's state_dict() into it"
            )
        super().__setattr__(name, value)

    def _begin(self, argument: str, value: float) -> None:
        """Check and take the first coefficient, once the settings are there."""
        value = self._check_value(argument, value)
        memory = self._first_memory(self, value)
        if self.ema:
            memory.update(kl_ema=0.0, measured=0.0)
        if self.device is None:
            self._value, self._memory = value, memory or None
        else:
            self._device_state = DeviceState(
                self._plan(), self, {"value": value, **memory}, self.device
            )

    def _first_memory(self, settings: Any, value: Number) -> rules.State:
        """The rule's state beside the coefficient, before the first update.

        Numbers and settings are floats, or tensors on which the rule runs.
        """
        return {}

    def _plan(self) -> rules.Plan:
        leaves_zero = self.floor is not None
        limit = rules.bounded_or_zero if leaves_zero else self._limit
        return rules.Plan(
            self._rule_of_settings(), limit, bool(self.ema), bool(self.dead_band), leaves_zero
        )

    def _rule_of_settings(self) -> rules.Rule:
        rule: rules.Rule = self._rule
        return rule

    @property
    def value(self) -> Any:
        """The coefficient of the KL penalty.

        A float; with ``device=`` a 0-dim fp64 tensor there, always the same one, updated in place.
        """
        return self._value if self._device_state is None else self._device_state.value

    @property
    def skipped(self) -> Any:
        """How many values were left out because they were NaN or infinite.

        An int; with ``device=`` a 0-dim int64 tensor there.
        """
        return self._skipped if self._device_state is None else self._device_state.skipped

    @property
    def highest(self) -> float:
        """The upper bound of the coefficient. Without a bound it is the largest float64."""
        return min(self.max_coef, sys.float_info.max)

    @property
    def lowest(self) -> float:
        """The lower bound of a coefficient that acts, ``floor`` or ``min_coef``."""
        return self.min_coef if self.floor is None else self.floor

    def _check_value(self, argument: str, value: object) -> float:
        if self.floor is not None and check_number(argument, value, least=0) == 0:
            return 0.0
        if self.lowest > 0 and type(value) in (int, float) and value == 0:
            raise ValueError(
                f"{argument} must be a finite number >= {self.lowest}, got {value!r}: a rule that "
                "multiplies never leaves 0; floor= lets the coefficient be 0 and leave it"
            )
        number = check_number(argument, value, least=self.lowest)
        if number > self.max_coef and self._default_bound is None:
            raise ValueError(f"{argument} must be <= max_coef={self.max_coef}, got {value!r}")
        return number

    def _hold(self, value: float) -> None:
        """Raise a default bound to a coefficient that a run without one has reached."""
        if self._default_bound is not None and value > self.max_coef:
            vars(self)["max_coef"] = value
            if self._device_state is not None:
                self._device_state.settings.highest.fill_(value)

    def _check_n_steps(self, n_steps: object) -> int:
        return check_count("n_steps", n_steps, least=0)

    def update(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | Tensor | None = None,
        *,
        kl: KLName = "kl",
    ) -> Any:
        """Move the coefficient after a batch.

        With ``device=`` nothing waits for the device, whatever of the arguments is there, and a
        CUDA graph can capture the call. With ``process_group=`` every rank must call it, in the
        same order, with its own data: a rank without any passes statistics that keep no token, or
        ``n_steps=0``. The ranks' sums and counts are added in fp64 by one all-reduce.

        On the host a ``RuntimeWarning`` says once what keeps the KL off its target: that the KL of
        a ``KLStats`` is over 20 times off it, and within 5 times in the other unit; and that for
        100 updates in a row it was off by over a fifth on one side and came no nearer, with the
        likely cause (a bound, the rule's pace, the unit). With ``process_group=`` the group's rank
        0 says it. Nothing is said with ``device=``, whose numbers are not read.

        Args:
            current: the batch's mean KL in nats: a number, a 0-dim tensor, or a ``KLStats``, whose
                mean is taken by ``unit``. NaN, inf or a number beyond float64 changes nothing: it
                is counted in ``skipped`` and, on the host, warned of once. So is a ``KLStats`` that
                keeps no token, which has no mean. Statistics of DTensors are of all sequences on
                every rank, and there must be no ``process_group``.
            n_steps: the number of sequences in the batch (over all ranks; with ``process_group=``
                those of this rank, which weigh its KL, 1 by default); those of the ``KLStats`` by
                default. Of the rules, ``AdaptiveKLController``'s alone uses it, and needs it with a
                plain number. With ``device=`` it may be a 0-dim tensor.
            kl: which sums of a ``KLStats`` steer. ``"kl"``: those of the estimator that the penalty
                was taken with, weights and limits included, so that what is held is what the
                coefficient multiplies. ``"k1"``, ``"k2"``, ``"k3"``: the plain estimator's, which
                is the same number whatever the penalty's estimator is, as for an estimator with
                importance weights or clips. ``k1`` is unbiased and may be negative.

        Returns:
            The new coefficient, ``value``.

        Raises:
            TypeError: ``current`` is not a number; ``n_steps`` is not an integer, or is missing.
            ValueError: ``n_steps`` is negative or beyond float64; DTensors with ``process_group=``;
                ``kl`` is unknown, or not ``"kl"`` for a number or for statistics of
                :func:`klfast.kl_divergence` without ``token_ids``, which have no other (with
                ``device=`` these are skipped).
            RuntimeError: the ranks have different coefficients (with ``device=``, ``state_dict``
                says so), or a rank has died.
        """
        current = chosen(plain(current, self._ranks), kl, reads=self._device_state is None)
        n_steps = self._sequences(current, n_steps)
        if self._ranks is not None:
            row = self._measured_here(current, n_steps, self._ranks)
            return self._take(self._ranks.gather(row))
        if self._device_state is not None:
            return self._update_on_device(self._device_state, current, n_steps)
        means = self._read(current)
        if means is not None:
            self._require(n_steps)
            self._steer(means, n_steps)
        return self._value

    def _sequences(
        self, current: float | Tensor | KLStats, n_steps: int | Tensor | None
    ) -> int | Tensor | None:
        """The checked number of sequences, None if it is not known."""
        if n_steps is None:
            return current.kl.numel() if isinstance(current, KLStats) else None
        if isinstance(n_steps, Tensor) and self._device_state is not None:
            check_scalar("n_steps", n_steps)
            return n_steps
        return self._check_n_steps(n_steps)

    def _check_update(
        self, current: float | Tensor | KLStats, n_steps: int | Tensor | None
    ) -> None:
        """Raise what ``update`` would raise for its arguments, and change nothing."""
        self._checked(current)
        self._require(self._sequences(current, n_steps))

    def _require(self, n_steps: object) -> None:
        if self._needs_n_steps and n_steps is None:
            raise TypeError("n_steps must be given when current is not a KLStats, got None")

    def _steer(self, means: Means, n_steps: Any) -> None:
        """Move by a finite KL, on the host, then say what keeps it off its target."""
        target, before = self._target_now(), self._value
        self._move(means.kl, n_steps)
        if target is None or before == self._value == 0:  # nothing acts
            return
        self._ask_unit(means, target)
        if not self._told_of_stall:
            self._look_for_stall(means, target, before, n_steps)

    def _look_for_stall(self, means: Means, target: float, before: float, n_steps: Any) -> None:
        """Count what brings the KL no nearer to its target, and warn, once, of too much of it."""
        if self._value == 0 or (self.floor is not None and means.kl < target):
            self._stall = None  # a floor makes an upper limit of the target: the rule may rest
            return
        steering, self._stall = self._steering(), self._stall or Stall()
        if not self._stall.add(means.kl, target, steering.dead_band, before, self._value):
            return
        self._told_of_stall = True
        if is_of_other_unit(means, target):
            self._ask_unit(means, target, is_stalled=True)
        else:
            self._warn(self._stall_warning(self._stall, means, target, steering._pace(n_steps)))

    def _stall_warning(self, stall: Stall, means: Means, target: float, pace: str) -> str:
        bound, at = ("max_coef", self.max_coef) if stall.side > 0 else ("min_coef", self.min_coef)
        if self._value == at:
            return bound_warning(
                self._name, stall.side, means, self.unit, target, f"{bound}={at:.4g}"
            )
        return stall_warning(self._name, stall, self._value, means, self.unit, target, pace)

    def _steering(self) -> CoefficientController:
        """The controller whose settings say how the coefficient moves."""
        return self

    def _pace(self, n_steps: Any) -> str:
        """The setting that bounds how fast the coefficient moves, and the remedy."""
        return f"its pace is set by {self._paced_by}={getattr(self, self._paced_by)!r}: raise it"

    def _move(self, kl: float, n_steps: Any) -> None:
        """Apply the rule to a finite KL, on the host."""
        state = {"value": self._value, **(self._memory or {})}
        new = rules.advance(Floats(), self._plan(), self, state, kl, n_steps)
        self._value = new.pop("value")
        self._memory = new or None

    @torch.no_grad()
    def _update_on_device(
        self, state: DeviceState, current: float | Tensor | KLStats, n_steps: int | Tensor | None
    ) -> Tensor:
        self._require(n_steps)
        device = state.value.device
        kl = self._checked(current)
        if isinstance(kl, KLStats):
            kl = torch.where(kl.length.any(), mean_of(kl, self.unit), math.nan)
        state.update(on_device(kl, device), on_device(1 if n_steps is None else n_steps, device))
        return state.value

    def _measured_here(
        self, current: float | Tensor | KLStats, n_steps: int | Tensor | None, ranks: Ranks
    ) -> Tensor:
        """This rank's row of the all-reduce."""
        self._require(n_steps)
        kl = self._checked(current)
        if self._device_state is None:
            return row_of(kl, n_steps, self._value, self.unit, ranks.device)
        return row_of(
            kl, n_steps, self._device_state.value, self.unit, self._device_state.value.device
        )

    def _take(self, table: Tensor) -> Any:
        """Move by the rows of all ranks."""
        if self._device_state is not None:
            with torch.no_grad():
                self._device_state.update_of_ranks(table)
            return self._device_state.value
        measured = Measured(table)
        measured.check_agreement(f"{type(self).__name__}'s value")
        means = self._valid(measured.means) if measured.is_given else None
        if means is not None:
            self._steer(means, measured.n_steps)
        return self._value

    def _checked(self, current: float | Tensor | KLStats) -> float | Tensor | KLStats:
        """Statistics as they are; a number as a float, or, on a device, as a 0-dim tensor."""
        if isinstance(current, KLStats):
            return current
        if self._device_state is None or not isinstance(current, Tensor):
            return number_of(current)
        check_scalar("current", current, KL_INPUT)
        return current

    def _state(self) -> tuple[float, dict[str, float]]:
        """The coefficient and what else is remembered, as floats."""
        if self._device_state is None:
            return self._value, dict(self._memory or {})
        state = self._device_state.read()
        return state.pop("value"), state

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient, the count of skipped values and the rule's memory.

        Plain JSON, and the same on the host and on a device: a state of one loads into the other.
        Of the settings it has ``unit`` and ``target``, where there is a target. With ``device=``
        this waits for the device.

        Raises:
            RuntimeError: with ``device=`` and ``process_group=``, the ranks had different
                coefficients in an update since the state was loaded.
        """
        disagreements = 0 if self._device_state is None else int(self._device_state.disagreements)
        if disagreements:
            raise RuntimeError(
                f"{type(self).__name__}'s value must be the same on every rank, got different ones "
                f"in {disagreements} updates"
            )
        return self._framed(self._content())

    def _measured_in(self) -> dict[str, Any]:
        return {} if self.target is None else super()._measured_in()

    def _content(self) -> dict[str, Any]:
        value, memory = self._state()
        return {"value": value, "memory": memory} if memory else {"value": value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` returned; the settings stay those of this object.

        The target stays this object's too: a run goes on from the state's coefficient to the new
        target. A default ``max_coef`` rises to the coefficient of the state. A state
        from before the option ``ema`` was given, or after, loads: the average begins anew. So does
        the count of updates that a warning of ``update`` needs, and a warning may be given again.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` is of another kind, version or unit, lacks a key or has an unknown
                one, or its coefficient is outside this object's bounds. The object is then
                unchanged. States of earlier versions, without a unit, load.
        """
        skipped = self._check_state_frame(state, optional=("memory",))
        value = self._check_value("state['value']", state["value"])
        memory = self._check_memory(state.get("memory", {}))
        self._hold(value)
        if self._device_state is not None:
            self._device_state.write({"value": value, **memory}, skipped)
            self._device_state.disagreements.zero_()
            return
        self._value, self._memory, self._skipped = value, memory or None, skipped
        self._stall = None

    def _check_memory(self, memory: object) -> dict[str, float]:
        if not isinstance(memory, dict):
            raise TypeError(f"state['memory'] must be a dict, got {type(memory).__name__}")
        own = self._state()[1]
        averages = memory.keys() & set(_OF_OPTIONS)
        if memory.keys() - averages != own.keys() - set(_OF_OPTIONS) or len(averages) == 1:
            raise ValueError(f"state['memory'] must have keys {[*own]}, got {[*memory]}")
        checked = {
            name: check_number(f"state['memory'][{name!r}]", value)
            for name, value in memory.items()
        }
        return {name: checked.get(name, 0.0) for name in own}


class TargetOptions(TypedDict, total=False):
    """The options of every controller with a target beside its unit and its bounds."""

    device: str | torch.device | None
    process_group: ProcessGroup | None
    dead_band: float
    ema: float
    floor: float | None


class TargetController(CoefficientController):
    """A controller with a target, and the options that all of those have.

    Args:
        target: the KL to hold, > 0, in nats per ``unit``: about 6 per sequence or 0.1 per token.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"sequence"`` (of the sums over
            each sequence) or ``"token"`` (over all tokens).
        min_coef: the lower bound, > 0.
        max_coef: the upper bound, >= ``min_coef``. None: 1,000 times ``init_kl_coef`` (``floor``
            where that is 0), which stops a target in the wrong unit. ``math.inf`` for none.
        device: where the coefficient lives, and is updated without a sync; None for the host.
        process_group: the ranks that measure together; None for this process alone.
        dead_band: >= 0; while ``abs(kl / target - 1) <= dead_band``, nothing moves. 0 for none.
        ema: the weight of the past in a moving average of the KL, which the rule then sees:
            ``average = ema * average + (1 - ema) * kl``, in [0, 1); 0 for the KL itself.
        floor: > 0; lets the coefficient be 0, at first and later. 0 then acts as ``floor``, which
            takes the place of ``min_coef``: the coefficient leaves 0 when the rule moves ``floor``
            upwards, and is 0 when the rule falls below it. None: a rule that multiplies would never
            leave 0, so the coefficient cannot be 0.
    """

    target: float

    def __init__(
        self,
        target: float,
        unit: Unit,
        min_coef: float,
        max_coef: float | None,
        *,
        device: str | torch.device | None = None,
        process_group: ProcessGroup | None = None,
        dead_band: float = 0.0,
        ema: float = 0.0,
        floor: float | None = None,
    ) -> None:
        super().__init__(unit, device, process_group)
        self.target = check_number("target", target, above=0)
        self.min_coef = check_number("min_coef", min_coef, above=0)
        if floor is not None:
            floor = check_number("floor", floor, above=0)
        self.floor = floor
        if max_coef is None:
            self._default_bound = math.inf
        elif not is_inf(max_coef):
            self.max_coef = check_number("max_coef", max_coef, least=floor or self.min_coef)
        self.dead_band = check_number("dead_band", dead_band, least=0)
        self.ema = check_part("ema", ema)

    def _begin(self, argument: str, value: float) -> None:
        if self._default_bound is not None:
            least = max(self._check_value(argument, value), self.lowest)
            self.max_coef = self._default_bound = MOST * least
        super()._begin(argument, value)

    def _set(
        self, above: float | None = None, least: float | None = None, **numbers: float
    ) -> None:
        """Check settings, numbers with a common bound, and keep them as attributes."""
        for name, number in numbers.items():
            setattr(self, name, check_number(name, number, above=above, least=least))


def is_inf(value: object) -> bool:
    """True if a setting is the number inf."""
    return isinstance(value, Real) and value == math.inf


def check_part(argument: str, value: object) -> float:
    """Return ``value`` as a float, or raise unless it is in [0, 1)."""
    number = check_number(argument, value, least=0)
    if number >= 1:
        raise ValueError(f"{argument} must be a finite number >= 0 and < 1, got {value!r}")
    return number


def check_torch_device(device: object) -> torch.device:
    """Return ``device`` as a torch.device, or raise unless it names one."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be a torch.device, its name or None, got {type(device).__name__}"
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch.device or its name, got {device!r}") from error
