"""What controllers and monitors share: reading a KL, skipping a bad one, framing a state."""

from __future__ import annotations

import hashlib
import inspect
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

from klfast.checks.arguments import check_choice, shown
from klfast.control.measured import Measured
from klfast.dtensors import gathered
from klfast.ranks import Ranks
from klfast.stats import KLStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Unit = Literal["sequence", "token"]
STATE_VERSION = 1
_LARGEST = torch.iinfo(torch.int64).max


def to_scalar(value: Any) -> Any:
    """Return what a 0-dim tensor or numpy scalar holds; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def warn_caller(message: str) -> None:
    """Issue a RuntimeWarning that names the line outside klfast which led here."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "klfast":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


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
    whole = gathered(current)
    if ranks is not None and whole is not current:
        raise ValueError(
            "process_group must be None for statistics of DTensors, which are of all sequences on "
            "every rank, got a group"
        )
    return whole


def mean_of(stats: KLStats, unit: Unit) -> Tensor:
    """The mean that ``unit`` names, 0-dim; for a batch that keeps tokens."""
    return stats.token_mean() if unit == "token" else stats.sequence_mean()


class KLReader(ABC):
    """What controllers and monitor share: reading a KL, skipping a bad one, framing a state."""

    _kind: ClassVar[str]
    _output: ClassVar[str]  # the name of what ``update`` returns
    _ranks: Ranks | None = None

    def __init__(self, unit: Unit, process_group: ProcessGroup | None = None) -> None:
        check_choice("unit", unit, get_args(Unit))
        self.unit = unit
        self._skipped: Any = 0
        if process_group is not None:
            self._ranks = Ranks(process_group)

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
        self, current: float | Tensor | KLStats, n_steps: int | None = None, also: Any = None
    ) -> float | None:
        """The KL as a float, of all ranks where there is a group; None if it is not finite.

        Args:
            current: as of ``update``.
            n_steps: the number of this process's sequences, if it is known.
            also: what must be the same on every rank beside the state, as plain JSON.

        Raises:
            RuntimeError: on every rank, unless all have the same state and ``also``.
        """
        current = plain(current, self._ranks)
        if self._ranks is None:
            return self._read(current)
        equal = _digest([self._content(), also])
        measured = Measured(
            self._ranks.gather(self._row(current, n_steps, equal, self._ranks.device))
        )
        measured.check_agreement(f"what {type(self).__name__} goes by", is_number=False)
        return self._finite(measured.kl)

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
            count: Any = length.sum() if self.unit == "token" else (length > 0).sum()
            sequences = current.kl.numel() if n_steps is None else n_steps
            return stacked((current.kl.double().sum(), count, sequences, equal, 1.0), device)
        kl: Any = current if self._stays_on_device(current) else number_of(current)
        count = 1 if n_steps is None else n_steps
        n_steps = 0 if n_steps is None else n_steps
        # A rank without sequences says nothing, whatever it calls its KL.
        if isinstance(count, Tensor):
            total: Any = torch.where(count > 0, kl * count, 0.0)
        else:
            total = kl * count if count else 0.0
        return stacked((total, count, n_steps, equal, 1.0), device)

    def _stays_on_device(self, current: object) -> bool:
        return False

    def _read(self, current: float | Tensor | KLStats) -> float | None:
        """Return ``current`` as a float; None, counted and warned of once, if it is not finite."""
        if isinstance(current, KLStats):
            # A batch that keeps no token has no mean, not one of 0.
            current = mean_of(current, self.unit) if current.length.any() else math.nan
        return self._finite(number_of(current))

    def _finite(self, kl: float) -> float | None:
        if math.isfinite(kl):
            return kl
        self._skipped += 1
        if self._skipped == 1:
            warn_caller(
                f"{type(self).__name__} skipped a KL of {kl}; .skipped counts any further ones"
            )
        return None

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """What a run has changed beside the count of skipped values, as plain JSON."""

    def _framed(self, content: dict[str, Any]) -> dict[str, Any]:
        frame = {"kind": self._kind, "version": STATE_VERSION, "skipped": int(self.skipped)}
        return {**frame, **content}

    def _check_state_frame(self, state: dict[str, Any], optional: tuple[str, ...] = ()) -> int:
        """Return ``skipped``, or raise unless kind, version and keys are this object's."""
        check_state_kind(state, self._kind)
        expected = self._framed(self._content()).keys()
        if not expected - set(optional) <= state.keys() <= expected | set(optional):
            raise ValueError(f"state must have keys {[*expected]}, got {[*state]}")
        skipped = check_count("state['skipped']", state["skipped"], least=0)
        if skipped > _LARGEST:
            raise ValueError(f"state['skipped'] must be within int64, got {skipped}")
        return skipped

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
