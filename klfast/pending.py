"""Statistics of many calls, kept as they came until they are merged."""

from __future__ import annotations

from typing import Any

import torch

from klfast.checks.arguments import check_choice
from klfast.dtensors import made_whole
from klfast.stats import KLStats
from klfast.transfer import json_of, numbers_of

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class PendingStats:
    """Statistics of calls: a list that any thread may append to, and what came before it.

    torch.compile guards the lengths of lists and looks into tuples, so that every micro-batch would
    compile a call anew. Of an object it looks at the class alone: a compiled call makes one.

    Attributes:
        newest: the list; appending to it and taking from it is atomic.
    """

    def __init__(self, newest: list[KLStats], before: PendingStats | None = None) -> None:
        self.newest, self._before = newest, before

    def parts(self) -> list[KLStats]:
        """All statistics, in their order."""
        lists: list[list[KLStats]] = []
        node: PendingStats | None = self
        while node is not None:
            lists.append(node.newest[:])
            node = node._before
        return [part for newest in reversed(lists) for part in newest]

    def without(self, count: int) -> PendingStats:
        """This without its first parts."""
        if self._before is not None:
            return PendingStats(self.parts()[count:])
        del self.newest[:count]
        return self


def are_whole(parts: list[KLStats]) -> bool:
    """Whether there are statistics of DTensors, which every rank has whole."""
    return any(made_whole(part) is not part for part in parts)


def merged(parts: list[KLStats], where: torch.device) -> KLStats:
    """The statistics of all sequences on a device, in one transfer from another one."""
    parts = [made_whole(part) for part in parts]
    if not parts:
        return KLStats(*torch.zeros(len(KLStats._fields), 0, device=where))
    if len({part.kl.device for part in parts}) > 1:
        parts = [_moved(part, where) for part in parts]
    return _moved(KLStats.cat(parts), where)


def state_of(parts: list[KLStats]) -> list[Any]:
    """Statistics as plain JSON; waits for the device.

    A list without a dict or a tensor, as ``torch.distributed.checkpoint`` stores one under one key,
    whatever it holds: the dtype, then the numbers of each field; empty for nothing.
    """
    if not parts:
        return []
    stats = merged(parts, torch.device("cpu"))
    dtype = next(name for name, dtype in _DTYPES.items() if dtype == stats.kl.dtype)
    return [dtype, *([*map(json_of, field.tolist())] for field in stats)]


def parts_of(argument: str, state: object) -> list[KLStats]:
    """The statistics that ``state_of`` was given, merged; errors name ``argument``.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if not isinstance(state, list):
        raise TypeError(f"{argument} must be a list, got {type(state).__name__}")
    if not state:
        return []
    dtype, *fields = state
    check_choice(f"{argument}[0]", dtype, _DTYPES)
    rows = [numbers_of(f"{argument}[{at}]", field) for at, field in enumerate(fields, 1)]
    lengths = [len(row) for row in rows]
    if len(rows) != len(KLStats._fields) or len({*lengths}) > 1:
        raise ValueError(
            f"{argument} must hold a dtype and {len(KLStats._fields)} lists of one length, got "
            f"lists of {lengths}"
        )
    return [KLStats(*torch.tensor(rows, dtype=_DTYPES[dtype]).unbind(0))]


def _moved(stats: KLStats, device: torch.device) -> KLStats:
    if stats.kl.device == device:
        return stats
    return KLStats(*torch.stack(stats).to(device).unbind(0))
