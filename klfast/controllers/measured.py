"""The measurements of a group's ranks, from one all-reduce."""

from __future__ import annotations

import math

from torch import Tensor

from klfast.controllers.diagnosis import Means
from klfast.ranks import folded

KL, COUNT, OTHER, N_STEPS, EQUAL, GIVEN = range(6)
"""The columns of a row, see :class:`Measured`."""


class Measured:
    """The measurement of all ranks together, from a table of rows.

    A row is the sum of KL, what it is divided by, what it would be divided by in the other unit
    (NaN if the rank does not know), the number of sequences, what must be equal on all ranks, and
    whether (1 or 0) the rank gave anything to measure.
    """

    def __init__(self, table: Tensor) -> None:
        table = table.cpu()  # one transfer
        self._equal: list[float] = table[:, EQUAL].tolist()
        total, count, other, n_steps, _, given = folded(table).tolist()
        is_valid = count > 0 and math.isfinite(n_steps)
        self.means = Means(
            total / count if is_valid else math.nan, total / other if other > 0 else math.nan
        )
        """The mean KL of all ranks; NaN where there is none, or sequences beyond float64."""
        self.n_steps = int(n_steps) if is_valid else 0
        """The number of sequences on all ranks."""
        self.is_given = given > 0

    def check_agreement(self, what: str, is_number: bool = True) -> None:
        """Raise on every rank unless all ranks have the same; a digest is no number to show.

        Raises:
            RuntimeError: they do not.
        """
        first, *others = self._equal
        apart = [rank for rank, value in enumerate(others, 1) if value != first]
        if apart:
            other = others[apart[0] - 1]
            got = f"{first!r} on rank 0 and {other!r}" if is_number else "another"
            raise RuntimeError(
                f"{what} must be the same on every rank, got {got} on rank {apart[0]}; "
                f"{len(apart)} of {1 + len(others)} ranks differ from rank 0"
            )
