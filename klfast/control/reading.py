"""What controllers and monitors share: reading a KL, skipping a bad one, framing a state."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
import textwrap
import warnings
from abc import ABC, abstractmethod
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from klfast.callers import caller
from klfast.checks.arguments import check_choice, check_number, shown
from klfast.control.diagnosis import Means, is_far, is_of_other_unit, is_young, unit_question
from klfast.control.measured import Measured
from klfast.dtensors import made_whole
from klfast.ranks import Ranks
from klfast.stats import KLStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Unit = Literal["sequence", "token"]
KLName = Literal["kl", "k1", "k2", "k3"]
"""Whose sums among a ``KLStats`` are measured."""
STATE_VERSION = 1
_LARGEST = torch.iinfo(torch.int64).max


def to_scalar(value: Any) -> Any:
    """Return what a 0-dim tensor or numpy scalar holds; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def warn_caller(message: str) -> None:
    """Issue a RuntimeWarning that names the line outside klfast which led here."""
    warnings.warn(message, RuntimeWarning, stacklevel=caller().stacklevel)


def check_count(argument: str, value: object, least: int) -> int:
    """Return ``value`` as an int, or raise unless it is an integer >= ``least`` within float64."""
    count = to_scalar(value)
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise TypeError(f"{argument} must be an integer >= {least}, got {shown(value)}")
    count = int(count)
    if not least <= count <= sys.float_info.max:
        raise ValueError(
            f"{argument} must be an integer >= {least} within float64, got {shown(value)}"
        )
    return count


NUMBER = "a number or a 0-dim tensor"
KL_INPUT = "a number, a 0-dim tensor or a KLStats"


def number_of(current: object, argument: str = "current", wanted: str = KL_INPUT) -> float:
    """``current`` as a float, inf beyond float64; TypeError unless it is one number."""
    kl = to_scalar(current)
    if isinstance(kl, bool) or not isinstance(kl, Real):
        got = textwrap.shorten(repr(current), 60, placeholder="...")
        raise TypeError(f"{argument} must be {wanted}, got {got}")
    number: Any = kl
    try:
        return float(number)
    except OverflowError:  # an integer or a fraction beyond float64
        return math.inf if number > 0 else -math.inf


def _digest(content: Any) -> float:
    """48 bits of a hash of plain JSON, as a number that fp64 holds exactly."""
    text = json.dumps(content).encode()
    return float(int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big"))


def plain(current: Any, ranks: Ranks | None) -> Any:
    """``current`` as plain tensors, which every rank has whole where it was a DTensor."""
    whole = made_whole(current)
    if ranks is not None and whole is not current:
        raise ValueError(
            "process_group must be None for statistics of DTensors, which are of all sequences on "
            "every rank, got a group"
        )
    return whole


def chosen(current: Any, kl: KLName, reads: bool) -> Any:
    """``current``, of statistics with the sums of ``kl`` in the place of the estimator's.

    Args:
        current: plain, as of ``update``.
        kl: as of ``update``.
        reads: whether the statistics may be looked at, which waits for their device.

    Raises:
        TypeError: ``kl`` is not a string.
        ValueError: it is no statistic, or one that ``current`` does not have.
    """
    if kl == "kl":
        return current
    check_choice("kl", kl, get_args(KLName))
    if not isinstance(current, KLStats):
        raise ValueError(f"kl must be 'kl' when current is not a KLStats, got {kl!r}")
    sums: Tensor = getattr(current, kl)
    if reads and sums.numel() and (sums.isnan().all() & ~current.nonfinite.any()):
        raise ValueError(
            f"kl must be 'kl' for statistics of divergences without token_ids, got {kl!r}, which "
            "they do not have"
        )
    return current._replace(kl=sums)


def mean_of(stats: KLStats, unit: Unit) -> Tensor:
    """The mean that ``unit`` names, 0-dim; for a batch that keeps tokens."""
    return stats.token_mean() if unit == "token" else stats.sequence_mean()


def means_of(stats: KLStats, unit: Unit, target: float | None) -> Means:
    """The mean that ``unit`` names, and the other one if the first is far off a target.

    A batch that keeps no token has no mean, not one of 0.
    """
    if not stats.length.any():
        return Means(math.nan)
    kl = float(mean_of(stats, unit))
    if target is None or not is_far(kl, target):
        return Means(kl)
    return Means(kl, float(mean_of(stats, "sequence" if unit == "token" else "token")))


class KLReader(ABC):
    """What controllers and monitor share: reading a KL, skipping a bad one, framing a state."""

    _kind: ClassVar[str]
    _output: ClassVar[str]  # the name of what ``update`` returns
    _changed_in_place: ClassVar[tuple[str, ...]] = ()  # attributes that a copy has for itself
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
        """What warnings call it."""
        name = type(self).__name__
        return name if self._group_of_data is None else f"{name} of {self._group_of_data!r}"

    @property
    def process_group(self) -> ProcessGroup | None:
        """The group whose ranks measure together, None for this process alone."""
        return None if self._ranks is None else self._ranks.group

    @property
    def skipped(self) -> int:
        """How many values were left out because they were NaN or infinite."""
        skipped: int = self._skipped
        return skipped

    def _measure(
        self,
        current: float | Tensor | KLStats,
        n_steps: int | None = None,
        also: Any = None,
        kl: KLName = "kl",
    ) -> Means | None:
        """The means of the KL, of all ranks where there is a group; None if it is not finite.

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
        measured = Measured(
            self._ranks.gather(self._row(current, n_steps, equal, self._ranks.device))
        )
        measured.check_agreement(f"what {type(self).__name__} goes by", is_number=False)
        return self._finite(measured.means)

    def _row(
        self,
        current: float | Tensor | KLStats,
        n_steps: Any,
        equal: Any,
        device: torch.device,
    ) -> Tensor:
        """What this rank puts into the all-reduce, see ``klfast.control.measured.Measured``."""
        if isinstance(n_steps, Tensor):  # a negative one spoils the row, and so the update
            n_steps = torch.where(n_steps < 0, math.nan, n_steps.double())
        if isinstance(current, KLStats):
            length = current.length.double()
            counts: tuple[Any, Any] = length.sum(), (length > 0).sum()
            own, other = counts if self.unit == "token" else counts[::-1]
            sequences = current.kl.numel() if n_steps is None else n_steps
            return stacked((current.kl.double().sum(), own, other, sequences, equal, 1.0), device)
        kl: Any = current if self._stays_on_device(current) else number_of(current)
        count: Any = 1 if n_steps is None else n_steps
        n_steps = 0 if n_steps is None else n_steps
        # A rank without sequences says nothing, whatever it calls its KL.
        if isinstance(count, Tensor):
            total: Any = torch.where(count > 0, kl * count, 0.0)
        else:
            total = kl * count if count else 0.0
        unknown = 0.0 if isinstance(count, int) and count == 0 else math.nan
        return stacked((total, count, unknown, n_steps, equal, 1.0), device)

    def _stays_on_device(self, current: object) -> bool:
        return False

    def _read(self, current: float | Tensor | KLStats) -> Means | None:
        """The means as floats; None, counted and warned of once, if the KL is not finite."""
        if isinstance(current, KLStats):
            target = None if self._asked_unit else self._target_now()
            return self._finite(means_of(current, self.unit, target))
        return self._finite(Means(number_of(current)))

    def _finite(self, means: Means) -> Means | None:
        if math.isfinite(means.kl):
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
        """What a run has changed beside the count of skipped values, as plain JSON."""

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


def stacked(parts: tuple[Any, ...], device: torch.device) -> Tensor:
    """Numbers and 0-dim tensors as one fp64 tensor on ``device``; nothing on it is read back."""
    if not any(isinstance(part, Tensor) for part in parts):
        return torch.tensor([float(part) for part in parts], dtype=torch.float64, device=device)
    return torch.stack([on_device(part, device) for part in parts])


def on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """A number or 0-dim tensor as a 0-dim fp64 tensor on ``device``, without its graph."""
    if isinstance(number, Tensor) and number.device.type == "cpu" != device.type:
        number = number.item()  # a copy to a GPU would wait for it, a fill does not
    if isinstance(number, Tensor):
        return number.detach().to(device=device, dtype=torch.float64)
    return torch.full((), float(number), dtype=torch.float64, device=device)
