"""One collective, from which every rank gets the same numbers bit for bit.

Tables of one shape are all-gathered. Numbers that are to be added up are sent by an all-reduce.
Then every rank adds them in the same fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

# Its name from torch 2.13 on, or its earlier name; None if torch was built without it.
_all_gather = getattr(distributed, "all_gather_single", None) or getattr(
    distributed, "all_gather_into_tensor", None
)


class Told(NamedTuple):
    """The shapes of the ranks' tables, one entry per rank, in the order of ranks."""

    rows: list[int]
    columns: list[int]
    is_double: list[bool]
    sharded: list[bool]


class Ranks:
    """The ranks of a process group, of which this process is one.

    Collectives raise the RuntimeError of torch.distributed if a rank has died or does not answer in
    time.
    """

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
        """The device on which the group's collectives take host numbers: the CPU if possible."""
        kinds = self.kinds
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())

    @property
    def kinds(self) -> list[str]:
        """The device types that the group's collectives support."""
        pairs = distributed.get_backend_config(self.group).split(",")
        return [pair.partition(":")[0] for pair in pairs]

    def gather(self, row: Tensor) -> Tensor:
        """Every rank's row, [ranks, *row.shape], in the order of ranks; one all-reduce."""
        # Each rank writes its row into a table of zeros with a row per rank. The sum of the tables
        # holds all rows. A number plus zeros is that number, so the rows arrive exactly, whatever
        # the order in which the collective adds.
        # NCCL takes no tensor of the host, and gloo none of some devices.
        where = row.device if row.device.type in self.kinds else self.device
        table = row.new_zeros((self.size, *row.shape), device=where)
        table[self.rank].copy_(row)
        distributed.all_reduce(table, group=self.group)
        return table.to(row.device)

    def all_gather(self, table: Tensor) -> Tensor:
        """Every rank's table, [ranks, *table.shape], in the order of ranks; one all-gather.

        Tables must have the same shape and dtype on all ranks.
        """
        if table.numel() == 0:
            return table.new_empty((self.size, *table.shape))
        where = table.device if table.device.type in self.kinds else self.device
        assert _all_gather is not None
        own = table.to(where).contiguous()
        everywhere = own.new_empty((self.size * own.numel(),))
        _all_gather(everywhere, own.view(-1), group=self.group)
        return everywhere.view(self.size, *own.shape).to(table.device)

    def add_up(self, tensor: Tensor) -> None:
        """Replace each rank's tensor by the sum of all ranks' tensors, in place; one all-reduce."""
        # Its size is the same on every rank, so that no rank waits for another here.
        if tensor.numel() == 0:
            return
        if tensor.device.type in self.kinds:
            distributed.all_reduce(tensor, group=self.group)
            return
        moved = tensor.to(self.device)
        distributed.all_reduce(moved, group=self.group)
        tensor.copy_(moved)

    def tell(self, table: Tensor, sharded: bool = False) -> Told:
        """The shape of every rank's [rows, columns] table; one all-reduce, and the host waits.

        ``sharded``: whether all ranks' tables have the same columns.
        """
        # An all-reduce of the tables, whose sizes may differ between ranks, would end the process
        # under gloo and hang under NCCL. The size of this one does not depend on the table.
        own = (*table.shape, table.dtype == torch.float64, bool(sharded))
        everywhere = self.gather(torch.tensor(own, dtype=torch.int64, device=self.device))
        rows, columns, is_double, of_shards = everywhere.T.tolist()
        return Told(rows, columns, [*map(bool, is_double)], [*map(bool, of_shards)])

    def side_by_side(self, table: Tensor, told: Told) -> Tensor:
        """The columns of all ranks' [rows, columns] tables, in the order of ranks.

        They are fp64 if a rank's table with columns is fp64, else fp32. ``told``: what ``tell``
        returned, with the same number of rows on every rank.
        """
        missing = max(told.columns) - table.shape[1]
        of_doubles = [n for n, double in zip(told.columns, told.is_double, strict=True) if double]
        dtype = torch.float64 if any(of_doubles) else torch.float32
        # An all-reduce takes tables of one shape, and ranks may have different numbers of columns.
        padded = torch.nn.functional.pad(table.to(dtype), (0, missing))
        parts = zip(self.gather(padded), told.columns, strict=True)
        return torch.cat([part[:, :count] for part, count in parts], 1)

    # A group belongs to its process and cannot be copied.
    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "process_group must be None for a controller to be pickled, got a group of this "
            "process; save its state_dict() instead"
        )


def members_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group, in its order."""
    return tuple(distributed.get_process_group_ranks(group))


def ranks_of(group: Any) -> Ranks | None:
    """The ranks of a group, or all ranks for None; None if this process is alone."""
    if group is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        group = distributed.group.WORLD
    ranks = Ranks(group, "group")
    return None if ranks.size == 1 else ranks


def check_same(what: str, values: Sequence[object], shows_values: bool = True) -> None:
    """Raise RuntimeError on every rank unless all ranks have the same values."""
    apart = [rank for rank, value in enumerate(values) if value != values[0]]
    if apart:
        other = values[apart[0]]
        got = f"{values[0]!r} on rank 0 and {other!r}" if shows_values else "another"
        raise RuntimeError(
            f"{what} must be the same on every rank, got {got} on rank {apart[0]}; {len(apart)} of "
            f"{len(values)} ranks differ from rank 0"
        )


def folded(rows: Tensor) -> Tensor:
    """The sum over the first dimension, by halves: the order depends only on its length."""
    while len(rows) > 1:
        half, rest = divmod(len(rows), 2)
        folded_half = rows[:half] + rows[half + rest :]
        rows = torch.cat([folded_half, rows[half : half + rest]]) if rest else folded_half
    return rows[0]
