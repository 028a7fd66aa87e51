"""What the ranks of a group have measured, from one all-reduce."""

from __future__ import annotations

import math

from torch import Tensor

from klfast.ranks import folded

KL, COUNT, N_STEPS, EQUAL, GIVEN = range(5)
"""The columns of a row, see :class:`Measured`."""


class Measured:
    """What all ranks measured, from a table of rows.

    A row is the sum of KL, what it is divided by, the number of sequences, what must be equal on
    all ranks, and whether (1 or 0) the rank gave anything to measure.
    """

    def __init__(self, table: Tensor) -> None:
        table = table.cpu()  # one transfer
        self._equal: list[float] = table[:, EQUAL].tolist()
        total, count, n_steps, _, given = folded(table).tolist()
        self.kl = total / count if count > 0 else math.nan
        """The mean KL of all ranks; NaN where none has anything to average."""
        self.n_steps = int(n_steps)
        """The number of sequences on all ranks."""
        self.is_given = given > 0

    def check_agreement(self, what: str) -> None:
        """Raise on every rank unless all ranks have the same.

        Raises:
            RuntimeError: they do not.
        """
        first, *others = self._equal
        apart = [rank for rank, value in enumerate(others, 1) if value != first]
        if apart:
            raise RuntimeError(
                f"{what} must be the same on every rank, got {first!r} on rank 0 and "
                f"{others[apart[0] - 1]!r} on rank {apart[0]}; {len(apart)} of {1 + len(others)} "
                "ranks differ from rank 0"
            )
