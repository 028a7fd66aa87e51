"""One all-reduce, from which every rank gets the same numbers bit for bit.

Each rank writes its row of numbers into a table of zeros with a row per rank; the sum of the tables
over ranks holds everybody's rows. A number plus zeros is that number, so the rows arrive exactly,
whatever the order in which the collective adds, and every rank adds them in the same fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed


class Ranks:
    """The ranks of a process group, of which this process is one."""

    def __init__(self, group: Any, argument: str = "process_group") -> None:
        if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
            raise TypeError(
                f"{argument} must be a torch.distributed.ProcessGroup that this process is in, "
                f"got {group!r}"
            )
        self.group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)

    @property
    def device(self) -> torch.device:
        """Where the group's collectives want host numbers: on the CPU, if they can be there."""
        kinds = self._kinds()
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())

    def _kinds(self) -> list[str]:
        """The kinds of devices that the group's collectives serve."""
        pairs = distributed.get_backend_config(self.group).split(",")
        return [pair.partition(":")[0] for pair in pairs]

    def gather(self, row: Tensor) -> Tensor:
        """Every rank's row, [ranks, *row.shape], in the order of ranks; one all-reduce.

        Raises:
            RuntimeError: of torch.distributed, where a rank has died or does not answer in time.
        """
        where = row.device if row.device.type in self._kinds() else self.device
        table = row.new_zeros((self.size, *row.shape), device=where)
        table[self.rank].copy_(row)
        distributed.all_reduce(table, group=self.group)
        return table.to(row.device)

    def side_by_side(self, table: Tensor) -> Tensor:
        """The columns of all ranks' tables, of any number each, in the order of ranks.

        Two all-reduces, of the numbers of columns and of the tables; this waits for the first. The
        result is fp64 if a rank's table with columns is, else fp32.

        Raises:
            RuntimeError: as of ``gather``.
        """
        columns, is_double = table.shape[1], table.dtype == torch.float64
        sizes = self.gather(table.new_tensor([columns, columns * is_double], dtype=torch.float64))
        counts, doubles = sizes.long().T.tolist()
        padded = torch.nn.functional.pad(table.double(), (0, max(counts) - columns))
        parts = zip(self.gather(padded), counts, strict=True)
        dtype = torch.float64 if any(doubles) else torch.float32
        return torch.cat([part[:, :count] for part, count in parts], 1).to(dtype)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "process_group must be None for a controller to be pickled, got a group of this "
            "process; save its state_dict() instead"
        )


def ranks_of(group: Any) -> Ranks | None:
    """The ranks of a group; of None all, if torch.distributed is initialised. None for one rank."""
    if group is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        group = distributed.group.WORLD
    ranks = Ranks(group, "group")
    return None if ranks.size == 1 else ranks


def folded(rows: Tensor) -> Tensor:
    """The sum over the first dimension, by halves: an order that depends on its length alone."""
    while len(rows) > 1:
        half, rest = divmod(len(rows), 2)
        folded_half = rows[:half] + rows[half + rest :]
        rows = torch.cat([folded_half, rows[half : half + rest]]) if rest else folded_half
    return rows[0]
