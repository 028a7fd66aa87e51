"""The base of controllers and watchers, which read KLs. It skips a wrong KL, and frames the state.

To a watcher a KL of +inf is above every limit. It skips NaN and -inf, which are no KL. A controller
skips +inf too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor

from klfast.callers import caller
from klfast.checks.arguments import check_choice, check_number
from klfast.controllers.current import (
    KLName,
    Unit,
    check_count,
    chosen,
    means_of,
    number_of,
    plain,
    row_of,
)
from klfast.controllers.diagnosis import Means, is_of_other_unit, is_young, unit_question
from klfast.controllers.measured import Measured
from klfast.ranks import Ranks
from klfast.stats import KLStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STATE_VERSION = 1
_LARGEST = torch.iinfo(torch.int64).max


def warn_caller(message: str) -> None:
    """Issue a RuntimeWarning that names the line outside klfast which led here."""
    warnings.warn(message, RuntimeWarning, stacklevel=caller().stacklevel)


def _digest(content: Any) -> float:
    """48 bits of a hash of plain JSON, as a number that fp64 holds exactly."""
    text = json.dumps(content).encode()
    return float(int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big"))


class KLReader(ABC):
    """A reader of KLs: it skips a bad one, warns of a unit, and frames its state."""

    _kind: ClassVar[str]
    _output: ClassVar[str]  # the name of what ``update`` returns
    _changed_in_place: ClassVar[tuple[str, ...]] = ()  # attributes that a copy has for itself
    _takes_infinity: ClassVar[bool] = True
    target: float | None = None
    _ranks: Ranks | None = None
    _group_of_data: str | None = None
    _is_mute: bool = False  # another rank says it
    _asked_unit: bool = False

    def __init__(self, unit: Unit, process_group: ProcessGroup | None = None) -> None:
        check_choice("unit", unit, get_args(Unit))
        self.unit = unit
        self._skipped: Any = 0
        if process_group is not None:
            self._ranks = Ranks(process_group)
            self._is_mute = self._ranks.rank != 0

    @property
    def _name(self) -> str:
        """The name in warnings."""
        name = type(self).__name__
        return name if self._group_of_data is None else f"{name} of {self._group_of_data!r}"

    @property
    def process_group(self) -> ProcessGroup | None:
        """The group whose ranks measure together, None for this process alone."""
        return None if self._ranks is None else self._ranks.group

    @property
    def skipped(self) -> int:
        """How many values were left out because they were NaN or -inf."""
        skipped: int = self._skipped
        return skipped

    def _measure(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | None = None,
        also: Any = None,
        kl: KLName = "kl",
    ) -> Means | None:
        """The means of the KL, of all ranks where there is a group; None if it is skipped.

        Args:
            current: as of ``update``.
            n_steps: the number of this process's sequences, if it is known.
            kl: as of ``update``.
            also: what must be the same on every rank beside the state, as plain JSON.

        Raises:
            RuntimeError: on every rank, unless all have the same state and ``also``.
        """
        current = chosen(plain(current, self._ranks), kl, reads=True)
        if self._ranks is None:
            return self._read(current)
        equal = _digest([self._content(), also])
        here = current if isinstance(current, KLStats) else number_of(current)
        row = row_of(here, n_steps, equal, self.unit, self._ranks.device)
        measured = Measured(self._ranks.gather(row))
        measured.check_agreement(f"what {type(self).__name__} goes by", is_number=False)
        return self._valid(measured.means)

    def _read(self, current: float | Tensor | KLStats) -> Means | None:
        """The means as floats; None, counted and warned of once, if the KL is skipped."""
        if isinstance(current, KLStats):
            target = None if self._asked_unit else self._target_now()
            return self._valid(means_of(current, self.unit, target))
        return self._valid(Means(number_of(current)))

    def _valid(self, means: Means) -> Means | None:
        if math.isfinite(means.kl) or (self._takes_infinity and means.kl == math.inf):
            return means
        self._skipped += 1
        if self._skipped == 1:
            warn_caller(
                f"{self._name} skipped a KL of {means.kl}; .skipped counts any further ones"
            )
        return None

    def _target_now(self) -> float | None:
        """The KL to hold in the next update; None where there is none."""
        return self.target

    def _ask_unit(self, means: Means, target: float | None, is_stalled: bool = False) -> None:
        """Warn, once, of a target that seems to be in the other unit.

        A low KL per token is asked about only when it ``is_stalled``: every run begins with one.
        """
        if target is None or self._asked_unit or not is_of_other_unit(means, target):
            return
        if is_young(means, target) and not is_stalled:
            return
        self._asked_unit = True
        self._warn(unit_question(self._name, means, self.unit, target))

    def _warn(self, message: str) -> None:
        """Warn on one rank alone of what all ranks know."""
        if not self._is_mute:
            warn_caller(message)

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """The state beside the count of skipped values, as plain JSON."""

    def _measured_in(self) -> dict[str, Any]:
        """The unit and the target, which a state tells of."""
        return {"unit": self.unit} | ({} if self.target is None else {"target": self.target})

    def _framed(self, content: dict[str, Any]) -> dict[str, Any]:
        frame = {"kind": self._kind, "version": STATE_VERSION, **self._measured_in()}
        return {**frame, "skipped": int(self.skipped), **content}

    def _check_state_frame(self, state: dict[str, Any], optional: tuple[str, ...] = ()) -> int:
        """Return ``skipped``, or raise unless kind, version, keys and unit are this object's.

        States of earlier versions have neither unit nor target.
        """
        check_state_kind(state, self._kind)
        expected = self._framed(self._content()).keys()
        optional = (*optional, *self._measured_in())
        if not expected - set(optional) <= state.keys() <= expected | set(optional):
            raise ValueError(f"state must have keys {[*expected]}, got {[*state]}")
        if state.get("unit", self.unit) != self.unit:
            raise ValueError(
                f"state['unit'] must be {self.unit!r}, in which this {type(self).__name__} "
                f"measures, got {state['unit']!r}; make one with the unit of the state"
            )
        if "target" in state:
            check_number("state['target']", state["target"], above=0)
        skipped = check_count("state['skipped']", state["skipped"], least=0)
        if skipped > _LARGEST:
            raise ValueError(f"state['skipped'] must be within int64, got {skipped}")
        return skipped

    def __copy__(self) -> Any:
        """A copy goes on by itself: an update of one changes nothing in the other."""
        other = type(self).__new__(type(self))
        own = {name: copy.copy(getattr(self, name)) for name in self._changed_in_place}
        vars(other).update({**vars(self), **own})
        return other

    def __repr__(self) -> str:
        settings = (name for name in vars(self) if not name.startswith("_"))
        names = (self._output, *settings, "skipped")
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({fields})"


def check_state_kind(state: object, kind: str) -> None:
    """Raise unless ``state`` is a dict of that kind and of this version."""
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict, got {type(state).__name__}")
    for key, expected in (("kind", kind), ("version", STATE_VERSION)):
        got = state.get(key)
        if type(got) is not type(expected) or got != expected:
            raise ValueError(f"state[{key!r}] must be {expected!r}, got {got!r}")
