"""Statistics of many calls, kept as they came until they are merged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from klfast.checks.arguments import check_choice
from klfast.dtensors import gathered as whole
from klfast.stats import KLStats

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


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

    def state(self) -> dict[str, Any] | None:
        """What was gathered as plain JSON, None for nothing; waits for the device."""
        if self.newest is None:
            return None
        stats = self.merged(torch.device("cpu"))
        dtype = next(name for name, dtype in _DTYPES.items() if dtype == stats.kl.dtype)
        rows = [[_to_json(number) for number in field.tolist()] for field in stats]
        return {"dtype": dtype, "rows": rows}

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
        if state is None:
            return cls()
        if not isinstance(state, dict):
            raise TypeError(f"{argument} must be a dict or None, got {type(state).__name__}")
        if state.keys() != {"dtype", "rows"}:
            raise ValueError(f"{argument} must have keys ['dtype', 'rows'], got {[*state]}")
        check_choice(f"{argument}['dtype']", state["dtype"], _DTYPES)
        try:
            rows = [[float(number) for number in row] for row in state["rows"]]
        except (TypeError, ValueError) as error:
            raise TypeError(f"{argument}['rows'] must hold rows of numbers") from error
        fields = len(KLStats._fields)
        if len(rows) != fields or any(len(row) != len(rows[0]) for row in rows):
            raise ValueError(f"{argument}['rows'] must be {fields} rows of one length")
        return cls.of([KLStats(*torch.tensor(rows, dtype=_DTYPES[state["dtype"]]).unbind(0))])


def _moved(stats: KLStats, device: torch.device) -> KLStats:
    if stats.kl.device == device:
        return stats
    return KLStats(*torch.stack(stats).to(device).unbind(0))


def _to_json(number: float) -> float | str:
    """A number as JSON holds it, which has neither NaN nor infinity; ``float`` reads both."""
    return number if math.isfinite(number) else str(number)
