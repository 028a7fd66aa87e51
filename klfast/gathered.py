"""Statistics of many calls, kept as they came until they are merged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from klfast.checks.arguments import check_choice, check_number
from klfast.dtensors import gathered as whole
from klfast.stats import KLStats

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_NOT_FINITE = ("nan", "inf", "-inf")


class Gathered:
    """The newest statistics, and what was gathered before them; neither at the beginning.

    torch.compile guards the lengths of lists and looks into tuples, so that every micro-batch would
    compile a call anew. Of an object it looks at the class alone.
    """

    def __init__(self, before: Gathered | None = None, newest: KLStats | None = None) -> None:
        self.before, self.newest = before, newest

    def parts(self) -> list[KLStats]:
        """What was gathered, in its order."""
        return [*self._newest_first()][::-1]

    def _newest_first(self) -> Iterator[KLStats]:
        node: Gathered | None = self
        while node is not None and node.newest is not None:
            yield node.newest
            node = node.before

    def are_whole(self) -> bool:
        """Whether there are statistics of DTensors, which every rank has whole."""
        return any(whole(part) is not part for part in self._newest_first())

    def merged(self, where: torch.device) -> KLStats:
        """The statistics of all sequences on a device, in one transfer from another one."""
        parts = [whole(part) for part in self.parts()]
        if not parts:
            return KLStats(*torch.zeros(len(KLStats._fields), 0, device=where))
        if len({part.kl.device for part in parts}) > 1:
            parts = [_moved(part, where) for part in parts]
        return _moved(KLStats.cat(parts), where)

    def state(self) -> list[Any]:
        """What was gathered as plain JSON; waits for the device.

        A list without a dict or a tensor, as ``torch.distributed.checkpoint`` stores one under one
        key, whatever it holds: the dtype, then the numbers of each field; empty for nothing.
        """
        if self.newest is None:
            return []
        stats = self.merged(torch.device("cpu"))
        dtype = next(name for name, dtype in _DTYPES.items() if dtype == stats.kl.dtype)
        return [dtype, *([_to_json(number) for number in field.tolist()] for field in stats)]

    @classmethod
    def of(cls, parts: list[KLStats]) -> Gathered:
        """What gathers these, in their order."""
        made = cls()
        for part in parts:
            made = cls(made, part)
        return made

    @classmethod
    def of_state(cls, argument: str, state: object) -> Gathered:
        """What ``state`` returned, under the name that it has for the user.

        Raises:
            TypeError, ValueError: it is something else.
        """
        if not isinstance(state, list):
            raise TypeError(f"{argument} must be a list, got {type(state).__name__}")
        if not state:
            return cls()
        dtype, *fields = state
        check_choice(f"{argument}[0]", dtype, _DTYPES)
        rows = [_of_json(f"{argument}[{at}]", field) for at, field in enumerate(fields, 1)]
        lengths = [len(row) for row in rows]
        if len(rows) != len(KLStats._fields) or len({*lengths}) > 1:
            raise ValueError(
                f"{argument} must hold a dtype and {len(KLStats._fields)} lists of one length, got "
                f"lists of {lengths}"
            )
        return cls.of([KLStats(*torch.tensor(rows, dtype=_DTYPES[dtype]).unbind(0))])


def _moved(stats: KLStats, device: torch.device) -> KLStats:
    if stats.kl.device == device:
        return stats
    return KLStats(*torch.stack(stats).to(device).unbind(0))


def _to_json(number: float) -> float | str:
    """A number as JSON holds it, which has neither NaN nor infinity."""
    return number if math.isfinite(number) else str(number)


def _of_json(argument: str, field: object) -> list[float]:
    """What a list of ``_to_json`` stands for."""
    if not isinstance(field, list):
        raise TypeError(f"{argument} must be a list of numbers, got {type(field).__name__}")
    return [
        float(number)
        if isinstance(number, str) and number in _NOT_FINITE
        else check_number(argument, number)
        for number in field
    ]
