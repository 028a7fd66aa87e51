"""Checks that the ranks of a sharded vocabulary make the same call, before they wait in it.

The check is one all-gather of a few integers. The host reads them if the group's collectives work
on the CPU, or under ``KLFAST_CHECK=1``. Then all ranks raise the same error, or none. A rank whose
own arguments are refused tells the others. With an NCCL-only group, reading would take a sync.
Ranks that do not agree then get NaN, and every rank must have the same number of rows.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from klfast import backends
from klfast.args.heads import Hidden
from klfast.args.rows import RowsArgs, Shards
from klfast.args.values import are_checked, checks_requested
from klfast.distributed.ranks import Ranks
from klfast.types.dtypes import wide
from klfast.types.names import DIRECTIONS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from klfast.types.names import BackendName

    Group = ProcessGroup | DeviceMesh

Fields = dict[str, object]
"""The values that must be the same on every rank, by name. Error messages show numbers."""

# The most fields that a call has.
_FIELDS = 30


def ranks_of_shards(group: Group) -> Ranks:
    """The ranks of a process group, or of a mesh of one dimension."""
    if distributed.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    "group must be a ProcessGroup or a DeviceMesh of one dimension, got one of "
                    f"{group.ndim}: {group}"
                )
            group = group.get_group()
    return Ranks(group, "group")


def telling(
    group: Group | None, *, may_wait: bool = False
) -> contextlib.AbstractContextManager[None]:
    """A context in which a rank makes its arguments. If it raises, the other ranks learn of it.

    ``may_wait``: whether the host may wait for a device, to read the ranks' fields.
    """
    return contextlib.nullcontext() if group is None else _telling(ranks_of_shards(group), may_wait)


@contextlib.contextmanager
def _telling(ranks: Ranks, may_wait: bool) -> Iterator[None]:
    try:
        yield
    except Exception:
        if ranks.size > 1 and _can_read(ranks, may_wait):
            # Ranks that make a call send a 1 first, and raise because this rank sends a 0. This
            # rank raises its own error, even if another is gone.
            with contextlib.suppress(RuntimeError):
                ranks.all_gather(torch.zeros(2 + _FIELDS, dtype=torch.int64, device=ranks.device))
        raise


def _can_read(ranks: Ranks, may_wait: bool) -> bool:
    """True if the host reads the ranks' fields. It is the same on every rank."""
    return may_wait or "cpu" in ranks.kinds or checks_requested()


def agreed(args: RowsArgs, group: Group, backend: BackendName) -> RowsArgs:
    """The arguments of a call, after all ranks of a group have agreed on it."""
    ranks, may_wait = ranks_of_shards(group), isinstance(args.source, Hidden)
    if ranks.size == 1:
        _check_words(args.words())
        return args
    # A backend that refuses the call must do so before the other ranks wait for this one.
    with _telling(ranks, may_wait):
        serving = backends.resolve(backend, args.device, args)
        fields = {**args.must_match(), "backend": serving.name}
    encoded = [_encoded(value) for value in fields.values()]
    compared = _compared if _can_read(ranks, may_wait) else _trusted
    shards = compared(ranks, args.words(), encoded, fields).to(args.device)
    args = args._replace(shards=shards)
    if are_checked(args.device):
        args.check_values()
    return args


def _compared(ranks: Ranks, words: int, encoded: list[int], fields: Fields) -> Shards:
    """The shards, after the host has compared all ranks' fields."""
    # Ranks may make different calls. The table of every call has the same size, so that none hangs.
    own = [1, words, *encoded, *(0,) * (_FIELDS - len(encoded))]
    table = ranks.all_gather(torch.tensor(own, device=ranks.device)).tolist()
    for rank, (is_there, *_) in enumerate(table):
        if not is_there:
            raise RuntimeError(
                f"rank {rank} of the {ranks.size} in group refused its arguments; see the error of "
                "that rank"
            )
    for place, name in enumerate(fields, 2):
        apart = [rank for rank, row in enumerate(table) if row[place] != table[0][place]]
        if apart:
            values = [row[place] for row in (table[0], table[apart[0]])]
            raise RuntimeError(_difference(name, apart, values))
    words_of_ranks = [of_rank for _, of_rank, *_ in table]
    edges = [0, *itertools.accumulate(words_of_ranks)]
    _check_words(edges[-1])
    return Shards(ranks, torch.tensor(edges), edges[-1], widest=max(words_of_ranks))


def _check_words(words: int) -> None:
    if words == 0:
        raise ValueError("the shards of group must have at least one token id, got none")


def _difference(name: str, apart: list[int], values: list[int]) -> str:
    text = f"{name} must be the same on every rank of group, "
    shown = {_encoded(choice): repr(choice) for choice in (*backends.BACKENDS, *DIRECTIONS)}
    # A count is a number on every rank. A chunk is a number or "auto", which travels as a checksum.
    if name.startswith("the number of") or all(number in shown for number in values):
        first, other = (shown.get(number, number) for number in values)
        return text + f"got {first} on rank 0 and {other} on rank {apart[0]}"
    return text + f"got another on rank {apart[0]} than on rank 0"


def _trusted(ranks: Ranks, words: int, encoded: list[int], _: Fields) -> Shards:
    """The shards, without a check on the host: only the device knows them."""
    # Filled by kernels: a copy from the host would wait for the device.
    own = [
        torch.full((), number, dtype=torch.int64, device=ranks.device)
        for number in (words, _mixed(encoded))
    ]
    table = ranks.all_gather(torch.stack(own))
    edges = torch.nn.functional.pad(table[:, 0].cumsum(0), (1, 0))
    return Shards(ranks, edges, None, (table[:, 1] != table[0, 1]).any())


def _encoded(value: object) -> int:
    """An int64 for a value; other values rarely have the same."""
    if isinstance(value, Tensor):
        return _digest(value) if are_checked(value.device) else 0
    if type(value) is int:
        return value
    if isinstance(value, tuple):
        return _mixed([*map(_encoded, value)])
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return zlib.crc32(repr(value).encode())  # hash() differs between processes


def _digest(tensor: Tensor) -> int:
    """A hash of a tensor's contents, an int64."""
    numbers: Any = tensor.detach().reshape(-1)
    if tensor.is_floating_point():
        numbers = wide(numbers)
        numbers = numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.int32)
    numbers = numbers.to(torch.int64)
    places = torch.arange(numbers.numel(), device=tensor.device)
    # Integer overflow wraps around here.
    mixed = (numbers ^ (numbers >> 29)) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 32)) * (2 * places + 1)
    return int((mixed.sum() ^ tensor.numel()).item())


def _mixed(numbers: list[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers))
