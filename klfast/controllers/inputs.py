"""The inputs of ``update``: their checks, the means of a KL, and the sums of all ranks."""

from __future__ import annotations

import math
import sys
import textwrap
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from klfast.args.checks import check_choice, check_integer
from klfast.controllers.diagnosis import Means
from klfast.distributed.ranks import Ranks, check_same, folded
from klfast.stats.kl import KLStats, gathered, is_without_tokens
from klfast.types.dtypes import wide, wide_dtype

Unit = Literal["sequence", "token"]
KLName = Literal["kl", "k1", "k2", "k3"]  # whose sums among a ``KLStats`` are measured

NUMBER = "a number or a 0-dim tensor"
KL_INPUT = "a number, a 0-dim tensor or a KLStats"


def to_scalar(value: Any) -> Any:
    """Return what a 0-dim tensor or numpy scalar holds; anything else as it is."""
    holds_one = getattr(value, "ndim", None) == 0 and not getattr(value, "is_meta", False)
    return value.item() if holds_one else value


def check_count(argument: str, value: object, least: int) -> int:
    """Return ``value`` as an int, or raise unless it is an integer >= ``least`` within float64."""
    wanted, within = f"an integer >= {least}", ("float64", sys.float_info.max)
    return check_integer(argument, to_scalar(value), wanted, least=least, within=within)


def number_of(current: object, argument: str = "current", wanted: str = KL_INPUT) -> float:
    """``current`` as a float, inf beyond float64; TypeError unless it is one number."""
    kl = to_scalar(current)
    # bool is a Real, and no KL.
    if isinstance(kl, bool) or not isinstance(kl, Real):
        got = textwrap.shorten(repr(current), 60, placeholder="...")
        raise TypeError(f"{argument} must be {wanted}, got {got}")
    number: Any = kl
    try:
        return float(number)
    except OverflowError:  # an integer or a fraction beyond float64
        return math.inf if number > 0 else -math.inf


def chosen_kl(current: Any, kl: KLName, ranks: Ranks | None) -> Any:
    """``current`` as plain tensors, with the sums of ``kl`` in the place of the estimator's."""
    # A DTensor is read as a whole: its shard on this rank has only some sequences.
    whole = gathered(current)
    if ranks is not None and whole is not current:
        raise ValueError(
            "process_group must be None for statistics of DTensors, which hold all sequences on "
            "every rank, got a group"
        )
    if kl == "kl":
        return whole
    check_choice("kl", kl, get_args(KLName))
    if not isinstance(whole, KLStats):
        raise ValueError(f"kl must be 'kl' when current is not a KLStats, got {kl!r}")
    sums: Tensor = getattr(whole, kl)
    if is_without_tokens(whole):
        raise ValueError(
            f"kl must be 'kl' for statistics of a divergence without token_ids, got {kl!r}: pass "
            "token_ids to the divergence"
        )
    return whole._replace(kl=sums)


# One all-reduce brings a row of each rank to every rank.

KL, COUNT, OTHER, N_STEPS, EQUAL, GIVEN = range(6)
"""The columns: the sum of KL, what it is divided by, what it would be divided by in the other unit
(NaN if the rank does not know), the number of sequences, what must be equal on all ranks, and
whether (1 or 0) the rank gave anything to measure.
"""


def row_of(
    current: float | KLStats, n_steps: int | None, equal: float, unit: Unit, device: torch.device
) -> Tensor:
    """A rank's row on ``device``. Statistics take one transfer."""
    if isinstance(current, KLStats):
        # fp64 where the device has it: fp32 cannot count beyond 2**24 tokens.
        length = wide(current.length)
        sums = torch.stack([wide(current.kl).sum(), length.sum(), (length > 0).sum()])
        total, tokens, sequences = sums.tolist()
        count, other = (tokens, sequences) if unit == "token" else (sequences, tokens)
        n_steps = current.kl.numel() if n_steps is None else n_steps
    else:
        count, n_steps = (1, 0) if n_steps is None else (n_steps, n_steps)
        # A rank without sequences says nothing, whatever it calls its KL.
        total = current * count if count else 0.0
        other = math.nan if count else 0.0
    parts = [float(part) for part in (total, count, other, n_steps, equal, 1.0)]
    return torch.tensor(parts, dtype=wide_dtype(device), device=device)


def means_of_ranks(
    table: Tensor, must_match: str, shows_values: bool = True
) -> tuple[Means | None, int]:
    """The means and the number of sequences of all ranks, from the table of their rows.

    The means are None where no rank gave anything, and NaN where there is no sequence, or sequences
    beyond float64. All ranks must have the same in the column ``EQUAL``, ``must_match`` in words.
    """
    table = table.cpu()  # one transfer
    check_same(must_match, table[:, EQUAL].tolist(), shows_values)
    total, count, other, n_steps, _, given = folded(table).tolist()
    # A group of data that no rank has leaves its controller alone.
    if not given:
        return None, 0
    if not (count > 0 and math.isfinite(n_steps)):
        return Means(math.nan), 0
    return Means(total / count, total / other if other > 0 else math.nan), int(n_steps)
