"""When to make the policy its own reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from klfast.checks.arguments import check_number
from klfast.controllers.current import NUMBER, KLName, Unit, check_count, number_of
from klfast.controllers.reading import KLReader
from klfast.stats import KLStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ReferenceReset"]

Reason = Literal["interval", "budget", "plateau"]


class ReferenceReset(KLReader):
    """Calls back when the reference should become the policy, which leaves a KL of 0 to spend.

    A reset is due, in this order,

    - ``"interval"``: ``interval`` updates after the last one;
    - ``"budget"``: when the KL has been above ``budget`` in ``patience`` updates in a row;
    - ``"plateau"``: when ``metric`` has not risen by more than ``min_delta`` above its best since
      the last reset in ``plateau`` updates.

    What a reset does (copy the policy's weights, average them, clear the optimizer) is the
    callback's.

    Args:
        callback: called with the reason when a reset is due, before ``update`` returns; None for
            none.
        interval: updates, >= 1; None for never.
        budget: nats per ``unit``, > 0; None for never.
        plateau: updates, >= 1; None for never.
        patience: updates, >= 1, of the budget.
        min_delta: >= 0, of the plateau.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"sequence"`` or ``"token"``.
        process_group: the ranks that measure together, and so reset together; each must call
            ``update``. None for this process alone.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: no trigger is given, a setting is out of its range, or ``unit`` is unknown.

    Sources: M. Liu et al., "ProRL" (2025, arXiv:2505.24864), section 2.3.2, resets reference and
    optimizer when the validation reward stalls, without numbers; A. Gorbatovski et al., "Learn Your
    Reference Model for Real Good Alignment" (2024, arXiv:2404.09656), at an interval.
    """

    _kind = "reference-reset"
    _output = "resets"

    def __init__(
        self,
        callback: Callable[[Reason], object] | None = None,
        *,
        interval: int | None = None,
        budget: float | None = None,
        plateau: int | None = None,
        patience: int = 1,
        min_delta: float = 0.0,
        unit: Unit = "sequence",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(unit, process_group)
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable or None, got {callback!r}")
        if interval is None and budget is None and plateau is None:
            raise ValueError("one of interval, budget, plateau must be given, got none")
        self._callback = callback
        self.interval = None if interval is None else check_count("interval", interval, least=1)
        self.budget = None if budget is None else check_number("budget", budget, above=0)
        self.plateau = None if plateau is None else check_count("plateau", plateau, least=1)
        self.patience = check_count("patience", patience, least=1)
        self.min_delta = check_number("min_delta", min_delta, least=0)
        self._resets = 0
        self._forget()

    def _forget(self) -> None:
        """Begin anew, as after a reset."""
        self._updates = self._above = self._stalled = 0
        self._best: float | None = None

    @property
    def resets(self) -> int:
        """How many resets have been due."""
        return self._resets

    def update(
        self,
        current: float | Tensor | KLStats,
        metric: float | Tensor | None = None,
        n_steps: int | None = None,
        *,
        kl: KLName = "kl",
    ) -> Reason | None:
        """Take a batch's KL and metric; the reason of a reset, None while none is due.

        Args:
            current: the batch's mean KL in nats: a number, a 0-dim tensor, or a ``KLStats``, whose
                mean is taken by ``unit``. inf is above the budget. NaN or -inf changes nothing: it
                is counted in ``skipped`` and warned of once. So is a ``KLStats`` that keeps no
                token.
            metric: what should rise, such as a validation reward, and the same on every rank. None
                says nothing of the plateau, and neither does NaN or inf.
            n_steps: with ``process_group=``, the weight of this rank's number in the mean of all
                ranks; 1 by default, 0 on a rank without data.
            kl: which sums of a ``KLStats`` to go by, as of a controller's ``update``.

        Raises:
            TypeError: ``current`` or ``metric`` is not a number, or ``n_steps`` not an integer.
            ValueError: ``n_steps`` is negative or beyond float64, or ``kl`` is unknown or not in
                ``current``.
            RuntimeError: the ranks have different metrics or counts, before any resets; or a rank
                has died.
        """
        if n_steps is not None:
            n_steps = check_count("n_steps", n_steps, least=0)
        score = None if metric is None else number_of(metric, "metric", NUMBER)
        means = self._measure(current, n_steps, score, kl)
        if means is None:
            return None
        self._count(means.kl, score)
        reason = self._reason()
        if reason is not None:
            self._resets += 1
            self._forget()
            if self._callback is not None:
                self._callback(reason)
        return reason

    def _count(self, kl: float, score: float | None) -> None:
        self._updates += 1
        is_above = self.budget is not None and kl > self.budget
        self._above = self._above + 1 if is_above else 0
        if score is None or not math.isfinite(score):
            return
        if self._best is None or score > self._best + self.min_delta:
            self._best, self._stalled = score, 0
        else:
            self._stalled += 1

    def _reason(self) -> Reason | None:
        if self.interval is not None and self._updates >= self.interval:
            return "interval"
        if self.budget is not None and self._above >= self.patience:
            return "budget"
        if self.plateau is not None and self._stalled >= self.plateau:
            return "plateau"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the best metric, as plain JSON; of the settings ``unit``."""
        return self._framed(self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "resets": self._resets,
            "updates": self._updates,
            "above": self._above,
            "stalled": self._stalled,
            "best": self._best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` returned; the settings stay those of this object.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` is of another kind, version or unit, or lacks a key or has an
                unknown one, or a value is out of its range. The object is then unchanged.
        """
        skipped = self._check_state_frame(state)
        counts = {
            name: check_count(f"state[{name!r}]", state[name], least=0)
            for name in ("resets", "updates", "above", "stalled")
        }
        best = state["best"]
        self._best = None if best is None else check_number("state['best']", best)
        self._resets, self._updates = counts["resets"], counts["updates"]
        self._above, self._stalled = counts["above"], counts["stalled"]
        self._skipped = skipped
