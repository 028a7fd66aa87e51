"""The base of controllers and watchers, which read KLs, and the base of controllers.

To a watcher a KL of +inf is above every limit. It skips NaN and -inf, which are no KL. A controller
skips +inf too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
import warnings
from abc import ABC
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor

from klfast.args.checks import check_choice, check_integer, check_number
from klfast.args.keywords import explains_keywords
from klfast.controllers import inputs, rules
from klfast.controllers.diagnosis import (
    OTHER_UNIT,
    PLAUSIBLE,
    UPDATES,
    Means,
    Stall,
    is_far,
    is_of_other_unit,
)
from klfast.controllers.inputs import KLName, Unit, check_count
from klfast.distributed.ranks import Ranks
from klfast.stats.kl import KLStats
from klfast.types.callers import caller
from klfast.types.dtypes import wide_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STATE_VERSION = 1


def warn_caller(message: str) -> None:
    """Issue a RuntimeWarning that names the line outside klfast which led here."""
    warnings.warn(message, RuntimeWarning, stacklevel=caller().stacklevel)


def check_state(
    state: object, kind: str, keys: Collection[str], optional: Collection[str] = ()
) -> None:
    """Raise unless ``state`` is a dict of that kind, of this version and with these keys."""
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict, got {type(state).__name__}")
    for key, expected in (("kind", kind), ("version", STATE_VERSION)):
        got = state.get(key)
        # True equals 1, and is no version.
        if type(got) is not type(expected) or got != expected:
            raise ValueError(f"state[{key!r}] must be {expected!r}, got {got!r}")
    expected_keys = ["kind", "version", *keys]
    if not {*expected_keys} - {*optional} <= state.keys() <= {*expected_keys, *optional}:
        raise ValueError(f"state must have keys {expected_keys}, got {[*state]}")


class Field(NamedTuple):
    """A row of a class's table ``_saved``: an entry of its state, and where the object has it.

    ``check(object, "state['name']", value)`` returns the attribute, or raises. ``plain`` returns
    the attribute as plain JSON.
    """

    name: str
    attribute: str
    check: Callable[[Any, str, Any], Any]
    plain: Callable[[Any], Any] = lambda value: value


def count_field(name: str, attribute: str | None = None) -> Field:
    """The entry of a number of updates."""
    return Field(
        name, attribute or f"_{name}", lambda _, argument, value: check_count(argument, value, 0)
    )


class KLReader(ABC):
    """A reader of KLs. It skips a bad one, asks about the unit of its target, and has a state."""

    _kind: ClassVar[str]
    _output: ClassVar[str]  # the name of what ``update`` returns
    _saved: ClassVar[tuple[Field, ...]]
    _saved_sometimes: ClassVar[tuple[str, ...]] = ()
    _changed_in_place: ClassVar[tuple[str, ...]] = ()  # attributes that a copy has for itself
    _shown: ClassVar[tuple[str, ...]] = ()  # the settings in the repr; () for all
    _infinity: ClassVar[float | None] = math.inf  # None where it is skipped
    _needs_n_steps: bool = False
    target: float | None = None
    _ranks: Ranks | None = None
    _inner: Any = None  # a controller within it, as a scheduled one has
    _is_mute: bool = False  # another rank says it
    _asked_unit: bool = False
    _asked_sign: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A subclass without its own ``__init__`` has its base class's, which explains already.
        if "__init__" in vars(cls):
            cls.__init__ = explains_keywords(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, unit: Unit, process_group: ProcessGroup | None = None) -> None:
        check_choice("unit", unit, get_args(Unit))
        self.unit = unit
        self._name = type(self).__name__  # in warnings
        self._skipped = 0
        if process_group is not None:
            self._ranks = Ranks(process_group)
            # All ranks measure the same KL, so one of them warns.
            self._is_mute = self._ranks.rank != 0

    @property
    def process_group(self) -> ProcessGroup | None:
        """The group whose ranks measure together, None for this process alone."""
        return None if self._ranks is None else self._ranks.group

    @property
    def skipped(self) -> int:
        """The number of values that were left out. NaN and -inf are, and inf by a controller."""
        return self._skipped

    def _check_n_steps(self, n_steps: object) -> int:
        return check_count("n_steps", n_steps, least=0)

    def _checked(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | Tensor | None,
        kl: KLName,
        ranks: Ranks | None,
    ) -> tuple[float | KLStats, int | None]:
        """Plain statistics or one number, and ``n_steps``, or the error of ``update``."""
        whole = inputs.chosen_kl(current, kl, ranks)
        if n_steps is not None:
            n_steps = self._check_n_steps(n_steps)
        if isinstance(whole, KLStats):
            return whole, whole.kl.numel() if n_steps is None else n_steps
        number = inputs.number_of(whole)
        # A KL that is skipped moves nothing, and needs no number of sequences.
        if self._needs_n_steps and n_steps is None and math.isfinite(number):
            raise TypeError("n_steps must be given when current is not a KLStats, got None")
        return number, n_steps

    def _measure(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | Tensor | None,
        kl: KLName,
        also: Any = None,
    ) -> Means | None:
        """The means of the KL, of all ranks where there is a group; None if it is skipped."""
        given, count = self._checked(current, n_steps, kl, self._ranks)
        if self._ranks is None:
            return self._valid(self._means(given))
        # Ranks with another state, or another ``also``, would decide differently from now on.
        text = json.dumps([self._content(), also]).encode()
        # 48 bits of a hash, which fp64 holds exactly
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")
        row = inputs.row_of(given, count, float(digest), self.unit, self._ranks.device)
        must_match = f"what {type(self).__name__} goes by"
        means, _ = inputs.means_of_ranks(self._ranks.gather(row), must_match, shows_values=False)
        return self._valid(means)

    def _means(self, current: float | KLStats) -> Means:
        """The means of this process as floats, the other unit's where a question needs it."""
        if not isinstance(current, KLStats):
            return Means(current)
        # A batch that keeps no token has no mean. Its mean is not 0.
        if not current.length.any():
            return Means(math.nan)
        token, sequence = current.token_mean, current.sequence_mean
        own, other = (token, sequence) if self.unit == "token" else (sequence, token)
        kl, target = float(own()), None if self._asked_unit else self._target_now()
        # A second mean is a second transfer from a GPU.
        is_needed = target is not None and is_far(kl, target)
        return Means(kl, float(other()) if is_needed else math.nan)

    def _valid(self, means: Means | None) -> Means | None:
        """The means; None, counted and warned of once, if the KL is skipped."""
        if means is None or math.isfinite(means.kl) or means.kl == self._infinity:
            return means
        self._skipped += 1
        # Once, because a run with a bad batch often has many of them.
        if self._skipped == 1:
            warn_caller(
                f"{self._name} skipped a KL of {means.kl}; .skipped counts any further ones"
            )
        return None

    def _target_now(self) -> float | None:
        return self.target

    def _ask_unit(self, means: Means, target: float | None, is_stalled: bool = False) -> None:
        """Warn, once, of a target that seems to be in the other unit."""
        if target is None or self._asked_unit or not is_of_other_unit(means, target):
            return
        # Every run begins with a low KL per token, as the policy is still its reference.
        if means.kl < target < PLAUSIBLE and not is_stalled:
            return
        self._asked_unit = True
        other = OTHER_UNIT[self.unit]
        self._warn(
            f"{self._name}: the KL is {means.kl:.3g} nats per {self.unit}, "
            f"{means.kl / target:.2g} times its target of {target:.4g}, and {means.other:.3g} nats "
            f"per {other}, which is near it; did you mean unit={other!r}?"
        )

    def _ask_sign(self, kl: float) -> None:
        """Warn, once, of statistics of tokens that seem to be the other policy's."""
        if kl < 0 and not self._asked_sign:
            self._asked_sign = True
            self._warn(
                f"{self._name} got statistics with a KL of {kl:.4g}, below every limit: k1 is "
                "negative for tokens that an older policy sampled; pass statistics of estimator "
                "'k3_ref', which estimates the KL from such tokens and is never negative"
            )

    def _warn(self, message: str) -> None:
        """Warn on one rank alone of what all ranks know."""
        if not self._is_mute:
            warn_caller(message)

    def state_dict(self) -> dict[str, Any]:
        """Return what updates have changed, as plain JSON, with the count of skipped values.

        The state also has ``unit`` and, where there is one, ``target``.
        """
        frame = {"kind": self._kind, "version": STATE_VERSION, **self._measured_in()}
        return {**frame, "skipped": self._skipped, **self._content()}

    def _measured_in(self) -> dict[str, Any]:
        """The unit and the target, which a state tells of."""
        return {"unit": self.unit} | ({} if self.target is None else {"target": self.target})

    def _content(self) -> dict[str, Any]:
        """The state beside the count of skipped values, as plain JSON."""
        return {each.name: each.plain(getattr(self, each.attribute)) for each in self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` returned. This object keeps its settings.

        A controller goes on from the state's coefficient to its own target. A default ``max_coef``
        rises to the coefficient of the state. A state from before the option ``ema`` was given, or
        after, loads, and the average begins anew. So does the count of updates that a warning of
        ``update`` needs, and a warning may be given again. The status of a monitor follows from the
        state's values, without a warning; a smaller window keeps the last ones. The optimizer's own
        state holds the rates of a ``KLAdaptiveLR``.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` is of another kind, version or unit, lacks a key or has an unknown
                one, or an entry is out of its range. The range of a coefficient is this object's
                bounds. The object is then unchanged. States without a unit, of earlier versions,
                load.
        """
        measured_in = self._measured_in()
        # Earlier versions saved neither the unit nor the target.
        optional = {*self._saved_sometimes, *measured_in}
        check_state(state, self._kind, [*measured_in, "skipped", *self._content()], optional)
        # Values in another unit would mean something else.
        if state.get("unit", self.unit) != self.unit:
            raise ValueError(
                f"state['unit'] must be {self.unit!r}, the unit of this {type(self).__name__}, got "
                f"{state['unit']!r}; make it with unit={state['unit']!r}"
            )
        if "target" in state:
            check_number("state['target']", state["target"], above=0)
        given = inputs.to_scalar(state["skipped"])
        skipped = check_integer("state['skipped']", given, "an integer >= 0", least=0)
        # All entries are checked before one is taken, so that an error leaves the object as it is.
        entries = {
            each.attribute: each.check(self, f"state[{each.name!r}]", state.get(each.name, {}))
            for each in self._saved
        }
        self._restore({**entries, "_skipped": skipped})

    def _restore(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def __copy__(self) -> Any:
        """A copy goes on by itself: an update of one changes nothing in the other."""
        other = type(self).__new__(type(self))
        own = {name: copy.copy(getattr(self, name)) for name in self._changed_in_place}
        vars(other).update({**vars(self), **own})
        return other

    def __repr__(self) -> str:
        settings = self._shown or [name for name in vars(self) if not name.startswith("_")]
        names = (self._output, *settings, "skipped")
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({fields})"


class CoefficientController(KLReader):
    """A coefficient inside its bounds, and the rule that moves it.

    ``update`` is for one thread at a time; any may read ``value`` meanwhile.

    A subclass keeps its settings as attributes, then calls ``_begin`` with the first coefficient.
    """

    _output = "value"
    _saved = (
        Field("value", "_value", lambda self, name, value: self._check_value(name, value)),
        Field("memory", "_memory", lambda self, _, memory: self._check_memory(memory)),
    )
    _saved_sometimes = ("memory",)
    _changed_in_place: ClassVar[tuple[str, ...]] = ("_stall",)
    _infinity = None
    _rule: Any  # see ``rules``; of a class a static one
    _limit: ClassVar[Any] = staticmethod(rules.bounded)
    _paced_by: ClassVar[str]  # the setting that says how fast the coefficient moves
    _stall: Stall | None = None
    _told_of_stall: bool = False
    min_coef: float = 0.0
    max_coef: float = math.inf
    floor: float | None = None
    ema: float = 0.0
    dead_band: float = 0.0
    _default_bound: float | None = None  # None where max_coef was given
    _state: dict[str, float]  # the coefficient as "value", and the rule's memory
    _on_device: Tensor | None = None  # the coefficient once more, which a step on a GPU reads

    def __init__(
        self,
        unit: Unit,
        device: str | torch.device | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(unit, process_group)
        if not (device is None or isinstance(device, (str, torch.device))):
            raise TypeError(
                f"device must be a torch.device, its name or None, got {type(device).__name__}"
            )
        try:
            # torch raises RuntimeError for a name that it does not know.
            self.device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(
                f"device must be a torch.device or its name, got {device!r}"
            ) from error

    def _begin(self, argument: str, value: float) -> None:
        value = self._check_value(argument, value)
        state = {"value": value, **self._initial_memory(self, value)}
        if self.ema:
            # ``measured`` tells the first update that there is no average yet.
            state.update(kl_ema=0.0, measured=0.0)
        if self.device is not None:
            with torch.inference_mode(False):  # its tensors cannot be updated outside of it
                dtype = wide_dtype(self.device)
                self._on_device = torch.zeros((), dtype=dtype, device=self.device)
        self._move_to(state)

    @torch.no_grad()
    def _move_to(self, state: dict[str, float]) -> None:
        """Take a new state. A fill of the tensor does not wait for its device."""
        self._state = state
        if self._on_device is not None:
            self._on_device.fill_(state["value"])

    def __copy__(self) -> Any:
        other = super().__copy__()
        if self._on_device is not None:
            # A shared tensor would be filled by both.
            other._on_device = self._on_device.clone()
        return other

    def _initial_memory(self, settings: Any, value: rules.Number) -> rules.State:
        """The rule's state beside the coefficient, before the first update."""
        return {}

    @property
    def value(self) -> Any:
        """The coefficient of the KL penalty.

        A float; with ``device=`` a 0-dim fp64 tensor there (fp32 on devices without fp64). It is
        always the same tensor, which ``update`` fills.
        """
        return self._state["value"] if self._on_device is None else self._on_device

    @property
    def highest(self) -> float:
        """The upper bound of the coefficient. Without a bound it is the largest float64."""
        # A rule may overflow to inf, and then the coefficient must still be a number.
        return min(self.max_coef, sys.float_info.max)

    @property
    def lowest(self) -> float:
        """The lower bound of a coefficient that acts, ``floor`` or ``min_coef``."""
        return self.min_coef if self.floor is None else self.floor

    def _check_value(self, argument: str, value: object) -> float:
        # With a floor the coefficient may be 0, and nothing between 0 and the floor.
        if self.floor is not None and check_number(argument, value, least=0) == 0:
            return 0.0
        if self.lowest > 0 and type(value) in (int, float) and value == 0:
            raise ValueError(
                f"{argument} must be a finite number >= {self.lowest}, got {value!r}: a controller "
                "that multiplies never leaves 0; pass floor= to begin at 0"
            )
        number = check_number(argument, value, least=self.lowest)
        # A default bound rises to a coefficient of a checkpoint (``_hold``), a given one refuses
        # it.
        if number > self.max_coef and self._default_bound is None:
            raise ValueError(f"{argument} must be <= max_coef={self.max_coef}, got {value!r}")
        return number

    def update(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | Tensor | None = None,
        *,
        kl: KLName = "kl",
    ) -> Any:
        """Move the coefficient after a batch, and return the new one, ``value``.

        Reading a KL from a GPU waits for it, so call it outside of a captured CUDA graph or a
        compiled step. With ``device=`` they read the new coefficient in their next run. With
        ``process_group=`` every rank must call it, in the same order, with its own data: a rank
        without any passes statistics that keep no token, or ``n_steps=0``. The ranks' sums and
        counts are added in fp64 by one all-reduce.

        A ``RuntimeWarning``, of the group's rank 0, says once what keeps the KL off its target. The
        KL of a ``KLStats`` may be over 20 times off it, and within 5 times in the other unit. Or
        for 100 updates in a row it was off by over a fifth on one side and came no nearer. The
        warning then names the likely cause: a bound, the rule's pace, or the unit.

        Args:
            current: the batch's mean KL in nats: a number, a 0-dim tensor, or a ``KLStats``, whose
                mean is taken by ``unit``. NaN, inf or a number beyond float64 changes nothing: it
                is counted in ``skipped`` and warned of once. So is a ``KLStats`` that keeps no
                token, which has no mean. Statistics of DTensors are of all sequences on every rank,
                and there must be no ``process_group``.
            n_steps: the number of sequences in the batch over all ranks. With ``process_group=``
                it is the number on this rank, which weighs the rank's KL, 1 by default. A
                ``KLStats`` has its own number by default. Only ``AdaptiveKLController`` uses it,
                and needs it with a plain number.
            kl: which sums of a ``KLStats`` steer. ``"kl"`` takes the penalty's own estimator, with
                its weights and limits, so that the controller holds the KL that the coefficient
                multiplies. ``"k1"``, ``"k2"`` and ``"k3"`` take the plain estimator. Its value does
                not depend on the penalty's estimator, for example on importance weights or clips.
                ``k1`` is unbiased and may be negative.

        Raises:
            TypeError: ``current`` is not a number; ``n_steps`` is not an integer, or is missing.
            ValueError: ``n_steps`` is negative or beyond float64, DTensors come with
                ``process_group=``, or ``kl`` is unknown. A plain number takes only ``"kl"``, and so
                do statistics of :func:`klfast.kl_divergence` without ``token_ids``.
            RuntimeError: the ranks have different coefficients, or a rank has died.
        """
        given, count = self._checked(current, n_steps, kl, self._ranks)
        if self._ranks is None:
            self._steer(self._valid(self._means(given)), count)
        else:
            self._update_of_ranks(self._ranks.gather(self._row(given, count, self._ranks)))
        return self.value

    def _row(self, current: float | KLStats, n_steps: int | None, ranks: Ranks) -> Tensor:
        """This rank's row of the all-reduce, where the group's collectives are."""
        return inputs.row_of(current, n_steps, self._state["value"], self.unit, ranks.device)

    def _update_of_ranks(self, table: Tensor) -> None:
        means, n_steps = inputs.means_of_ranks(table, f"{type(self).__name__}'s value")
        self._steer(self._valid(means), n_steps)

    def _steer(self, means: Means | None, n_steps: Any) -> None:
        """Move by a KL that is not skipped, then say what keeps it off its target."""
        if means is None:
            return
        # Before the move, because a scheduled target goes by the steps so far.
        target, before = self._target_now(), self._state["value"]
        batch = rules.MeasuredBatch(means.kl, self.target, n_steps)
        self._move_to(rules.advance(self, self, self._state, batch))
        value = self._state["value"]
        if target is None or before == value == 0:  # nothing acts
            return
        self._ask_unit(means, target)
        if self._told_of_stall:
            return
        if value == 0 or (self.floor is not None and means.kl < target):
            self._stall = None  # a floor makes an upper limit of the target: the rule may rest
            return
        steering, self._stall = self._inner or self, self._stall or Stall()
        if not self._stall.add(means.kl, target, steering.dead_band, before, value):
            return
        self._told_of_stall = True
        # The unit explains more than a bound or a pace does.
        if is_of_other_unit(means, target):
            self._ask_unit(means, target, is_stalled=True)
            return
        self._warn(self._stall_warning(self._stall, means, target, steering._pace(n_steps)))

    def _stall_warning(self, stall: Stall, means: Means, target: float, pace: str) -> str:
        """The warning of a coefficient at its bound, or one whose moves do not show in the KL."""
        value, other = self._state["value"], OTHER_UNIT[self.unit]
        measured = f"{means.kl:.3g} nats per {self.unit}, target {target:.4g}"
        question = f"if the target is in nats per {other}, pass unit={other!r}"
        if value == (self.max_coef if stall.side > 0 else self.min_coef):
            where, bound = ("above", "max_coef") if stall.side > 0 else ("below", "min_coef")
            remedy = (
                "without a penalty too the policy stays this near to its reference: lower target"
            )
            if stall.side > 0:
                remedy = "raise max_coef, or lower the learning rate"
            return (
                f"{self._name}: the coefficient is at its bound {bound}={value:.4g}, and for "
                f"{UPDATES} updates the KL has been {where} its target: {measured}; {remedy}; "
                f"{question}"
            )
        less, more = sorted((stall.begun_at, value))
        # A coefficient that has not even changed by half in so many updates is slow. If it has
        # changed by more, the KL does not follow it. Then the penalty is not in the loss, or the
        # first coefficient was far from values that have an effect.
        if more > 1.5 * less:
            pace = f"the KL does not follow it yet: check that it is in the loss; {question}"
        return (
            f"{self._name}: in {UPDATES} updates the coefficient went from {stall.begun_at:.4g} to "
            f"{value:.4g}, and the KL came no nearer to its target: {measured}; {pace}"
        )

    def _pace(self, n_steps: Any) -> str:
        """The setting that bounds how fast the coefficient moves, and the remedy."""
        return f"its pace is set by {self._paced_by}={getattr(self, self._paced_by)!r}: raise it"

    def _measured_in(self) -> dict[str, Any]:
        return {} if self.target is None else super()._measured_in()

    def _content(self) -> dict[str, Any]:
        memory = {**self._state}
        value = memory.pop("value")
        return {"value": value, "memory": memory} if memory else {"value": value}

    def _check_memory(self, memory: object) -> dict[str, float]:
        if not isinstance(memory, dict):
            raise TypeError(f"state['memory'] must be a dict, got {type(memory).__name__}")
        own = [name for name in self._state if name != "value"]
        of_ema = {"kl_ema", "measured"}  # a checkpoint may lack them, or be the only one with them
        averages = memory.keys() & of_ema
        if memory.keys() - averages != {*own} - of_ema or len(averages) == 1:
            raise ValueError(f"state['memory'] must have keys {own}, got {[*memory]}")
        counts = {"step", "errors", "measured", "waited"}
        checked = {
            name: check_number(f"state['memory'][{name!r}]", v, least=0 if name in counts else None)
            for name, v in memory.items()
        }
        # An average that the checkpoint lacks begins anew.
        return {name: checked.get(name, 0.0) for name in own}

    def _restore(self, attributes: dict[str, Any]) -> None:
        self._hold(attributes["_value"])
        self._move_to({"value": attributes["_value"], **attributes["_memory"]})
        # A count of updates from before the state says nothing of those after it.
        self._skipped, self._stall = attributes["_skipped"], None

    def _hold(self, value: float) -> None:
        """Raise a default bound to a coefficient that a run without one has reached."""
        if self._default_bound is not None and value > self.max_coef:
            self.max_coef = value
