"""The argument ``current`` of ``update``, a KL: its checks, its means, and its row among ranks."""

from __future__ import annotations

import math
import sys
import textwrap
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from klfast.checks.arguments import check_choice, shown
from klfast.controllers.diagnosis import Means, is_far
from klfast.dtensors import made_whole
from klfast.dtypes import wide, wide_dtype
from klfast.ranks import Ranks
from klfast.stats import KLStats, is_without_tokens

Unit = Literal["sequence", "token"]
KLName = Literal["kl", "k1", "k2", "k3"]
"""Whose sums among a ``KLStats`` are measured."""


def to_scalar(value: Any) -> Any:
    """Return what a 0-dim tensor or numpy scalar holds; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


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


def check_scalar(argument: str, value: Tensor, wanted: str = "a number or a 0-dim tensor") -> None:
    """Raise unless a tensor is one real number, by its shape and dtype alone."""
    if value.dim() != 0 or value.dtype == torch.bool or value.is_complex():
        raise TypeError(
            f"{argument} must be {wanted}, got a tensor of shape {[*value.shape]} and dtype "
            f"{value.dtype}"
        )


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
    if reads and is_without_tokens(current):
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


def row_of(
    current: float | Tensor | KLStats,
    n_steps: int | Tensor | None,
    equal: float | Tensor,
    unit: Unit,
    device: torch.device,
) -> Tensor:
    """A rank's row of the all-reduce, see ``klfast.controllers.measured.Measured``.

    Args:
        current: statistics, a float, or a 0-dim tensor, which is not read.
        n_steps: the number of this rank's sequences, None if it is not known.
        equal: a number that must be the same on every rank.
        unit: of the mean.
        device: of the row.
    """
    if isinstance(n_steps, Tensor):  # a negative one spoils the row, and so the update
        n_steps = torch.where(n_steps < 0, math.nan, wide(n_steps))
    if isinstance(current, KLStats):
        length = wide(current.length)
        counts: tuple[Any, Any] = length.sum(), (length > 0).sum()
        own, other = counts if unit == "token" else counts[::-1]
        sequences = current.kl.numel() if n_steps is None else n_steps
        return stacked((wide(current.kl).sum(), own, other, sequences, equal, 1.0), device)
    count: Any = 1 if n_steps is None else n_steps
    n_steps = 0 if n_steps is None else n_steps
    # A rank without sequences says nothing, whatever it calls its KL.
    if isinstance(count, Tensor):
        total: Any = torch.where(count > 0, current * count, 0.0)
    else:
        total = current * count if count else 0.0
    unknown = 0.0 if isinstance(count, int) and count == 0 else math.nan
    return stacked((total, count, unknown, n_steps, equal, 1.0), device)


def stacked(parts: tuple[Any, ...], device: torch.device) -> Tensor:
    """Numbers and 0-dim tensors as one tensor on ``device``; nothing on it is read back."""
    if not any(isinstance(part, Tensor) for part in parts):
        return torch.tensor(
            [float(part) for part in parts], dtype=wide_dtype(device), device=device
        )
    return torch.stack([on_device(part, device) for part in parts])


def on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """A number or 0-dim tensor as a 0-dim tensor on ``device``, without its graph."""
    dtype = wide_dtype(device)
    if isinstance(number, Tensor) and number.device.type == "cpu" != device.type:
        number = number.item()  # a copy to a GPU would wait for it, a fill does not
    if isinstance(number, Tensor):
        return number.detach().to(device=device, dtype=dtype)
    number = float(number)
    if abs(number) > torch.finfo(dtype).max:
        number = math.copysign(math.inf, number)
    return torch.full((), number, dtype=dtype, device=device)
