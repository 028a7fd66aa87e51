"""Whether the ranks of a vocabulary's shards make one call, before they wait for each other in it.

One all-gather of a few integers. Where the group's collectives serve the CPU, or under
``KLFAST_CHECK=1``, they are looked at: all ranks raise the same error, or none, and a rank whose
own arguments are refused tells the others. Elsewhere that would take a sync: the ranks of a group
of NCCL alone get NaN where they do not agree, and must have as many rows each.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed

from klfast import backends
from klfast.checks.values import are_checked, checks_requested
from klfast.dtypes import wide
from klfast.logits.shards import Shards
from klfast.names import DIRECTIONS
from klfast.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from klfast.names import BackendName

    Group = ProcessGroup | DeviceMesh

Told = dict[str, object]
"""What must be the same on every rank, by its name in a message; numbers are shown there."""


class _ShardedCall(Protocol):
    """A call that several ranks make together."""

    def first(self) -> Tensor:
        """The tensor that has the device of the call."""

    def words(self) -> int:
        """The number of words, of this rank until the shards are known."""

    def told(self) -> Told:
        """What must be the same on every rank."""

    def check_values(self) -> None:
        """Raise ValueError for a value that is refused."""


Call = TypeVar("Call", bound=_ShardedCall)

_FIELDS = 30
"""Of a call at most."""


def ranks_of_shards(group: Group) -> Ranks:
    """The ranks of a process group, or of a mesh of one dimension.

    Raises:
        TypeError, ValueError: it is neither, or one that this process is not in.
    """
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


def call_of(
    make: Callable[..., Call],
    arguments: tuple[Any, ...],
    group: Group | None,
    backend: BackendName,
    *,
    may_wait: bool = False,
) -> Call:
    """The call of a public function's arguments; with a group after all ranks have said that they
    make the same one.

    Args:
        make: the call of the arguments, after their checks; ``of_shard`` says that it is of one.
        arguments: of the public function.
        group: the ranks of the shards; None, or of one rank, for a vocabulary that is whole.
        backend: which must serve the call, before the other ranks wait for it.
        may_wait: whether the host may wait for a device, to look at what ranks say.

    Raises:
        As ``make`` and ``agreed``; ValueError of values that all ranks have.
    """
    if group is None:
        return make(*arguments)
    ranks = ranks_of_shards(group)
    if ranks.size == 1:
        call = make(*arguments, of_shard=True)
        _check_words(call.words())
        return call

    def checked() -> tuple[Call, Told]:
        call = make(*arguments, of_shard=True)
        serving = backends.resolve(backend, call.first().device, cast(Any, call))
        return call, {**call.told(), "backend": serving.name}

    call, shards = agreed(ranks, checked, may_wait=may_wait)
    call = cast(Any, call)._replace(shards=shards)
    if are_checked(call.first(), in_kernel=False):
        call.check_values()
    return call


def agreed(
    ranks: Ranks, make: Callable[[], tuple[Call, Told]], *, may_wait: bool = False
) -> tuple[Call, Shards]:
    """The call of this rank, and the shards of all.

    Args:
        ranks: of the shards.
        make: returns this rank's checked call, and the fields that all ranks compare.
        may_wait: as of ``call_of``.

    Raises:
        RuntimeError: the ranks do not agree, or one of them has refused its arguments or is gone.
    """
    looks = may_wait or "cpu" in ranks.kinds or checks_requested()
    try:
        call, fields = make()
        words = call.words()
    except Exception:
        if looks:
            with contextlib.suppress(RuntimeError):  # of a rank that is gone: this error is first
                ranks.all_gather(torch.zeros(2 + _FIELDS, dtype=torch.int64, device=ranks.device))
        raise
    encoded = [_encoded(value) for value in fields.values()]
    shards = _compared(ranks, words, encoded, fields) if looks else _trusted(ranks, words, encoded)
    return call, shards.to(call.first().device)


def _compared(ranks: Ranks, words: int, encoded: list[int], fields: Told) -> Shards:
    """The shards, after a look at what every rank has told."""
    own = [1, words, *encoded, *(0,) * (_FIELDS - len(encoded))]
    table = ranks.all_gather(torch.tensor(own, device=ranks.device)).tolist()
    for rank, (is_there, *_) in enumerate(table):
        if not is_there:
            raise RuntimeError(
                f"group: rank {rank} of {ranks.size} has refused its arguments; its own error says "
                "which"
            )
    for place, (name, value) in enumerate(fields.items(), 2):
        apart = [rank for rank, row in enumerate(table) if row[place] != table[0][place]]
        if apart:
            values = [row[place] for row in (table[0], table[apart[0]])]
            raise RuntimeError(_difference(name, value, apart, values))
    words_of_ranks = [of_rank for _, of_rank, *_ in table]
    edges = [0, *itertools.accumulate(words_of_ranks)]
    _check_words(edges[-1])
    return Shards(ranks, torch.tensor(edges), edges[-1], widest=max(words_of_ranks))


def _check_words(words: int) -> None:
    if words == 0:
        raise ValueError("group must have a rank with at least one word, got none")


def _difference(name: str, value: object, apart: list[int], values: list[int]) -> str:
    text = f"{name} must be the same on every rank of group, "
    shown = {_encoded(choice): repr(choice) for choice in (*backends.BACKENDS, *DIRECTIONS)}
    if type(value) is int or all(number in shown for number in values):
        first, other = (shown.get(number, number) for number in values)
        return text + f"got {first} on rank 0 and {other} on rank {apart[0]}"
    return text + f"got another on rank {apart[0]} than on rank 0"


def _trusted(ranks: Ranks, words: int, encoded: list[int]) -> Shards:
    """The shards, which only the device knows."""
    # Filled by kernels: a copy from the host would wait for the device.
    own = [
        torch.full((), number, dtype=torch.int64, device=ranks.device)
        for number in (words, _mixed(encoded))
    ]
    table = ranks.all_gather(torch.stack(own))
    edges = torch.nn.functional.pad(table[:, 0].cumsum(0), (1, 0))
    return Shards(ranks, edges, None, (table[:, 1] != table[0, 1]).any())


def _encoded(value: object) -> int:
    """An int64 that another value hardly has."""
    if isinstance(value, Tensor):
        return _digest(value) if are_checked(value, in_kernel=False) else 0
    if type(value) is int:
        return value
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return zlib.crc32(repr(value).encode())


def _digest(tensor: Tensor) -> int:
    """The same of what a tensor holds."""
    numbers: Any = tensor.detach().reshape(-1)
    if tensor.is_floating_point():
        numbers = wide(numbers)
        numbers = numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.int32)
    numbers = numbers.to(torch.int64)
    places = torch.arange(numbers.numel(), device=tensor.device)
    # Sums of products wrap around.
    mixed = (numbers ^ (numbers >> 29)) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 32)) * (2 * places + 1)
    return int((mixed.sum() ^ tensor.numel()).item())


def _mixed(numbers: list[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers))
