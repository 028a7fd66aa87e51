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

    def __init__(self, group: Any) -> None:
        if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup that this process is in, "
                f"got {group!r}"
            )
        self.group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)

    @property
    def device(self) -> torch.device:
        """Where the group's collectives want host numbers: on the CPU, if they can be there."""
        pairs = distributed.get_backend_config(self.group).split(",")
        kinds = [pair.partition(":")[0] for pair in pairs]
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())

    def gather(self, row: Tensor) -> Tensor:
        """Every rank's row, [ranks, *row.shape], in the order of ranks; one all-reduce.

        Raises:
            RuntimeError: of torch.distributed, where a rank has died or does not answer in time.
        """
        table = row.new_zeros((self.size, *row.shape))
        table[self.rank].copy_(row)
        distributed.all_reduce(table, group=self.group)
        return table

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "process_group must be None for a controller to be pickled, got a group of this "
            "process; save its state_dict() instead"
        )


def folded(rows: Tensor) -> Tensor:
    """The sum over the first dimension, by halves: an order that depends on its length alone."""
    while len(rows) > 1:
        half, rest = divmod(len(rows), 2)
        folded_half = rows[:half] + rows[half + rest :]
        rows = torch.cat([folded_half, rows[half : half + rest]]) if rest else folded_half
    return rows[0]
