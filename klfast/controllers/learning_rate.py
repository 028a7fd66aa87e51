"""A learning rate that holds the KL of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from klfast.checks.arguments import check_number
from klfast.controllers.current import KLName, Unit, check_count
from klfast.controllers.reading import KLReader
from klfast.stats import KLStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

__all__ = ["KLAdaptiveLR"]


class KLAdaptiveLR(LRScheduler, KLReader):
    """A learning-rate scheduler that is stepped with the KL of the policy's last update.

    ``lr /= factor`` if ``current > high * target``, ``lr *= factor`` if
    ``0 < current < low * target``, limited to ``[min_lr, max_lr]``; every parameter group likewise.
    A KL that is too high never raises a rate, and one that is too low never lowers it.
    ``current`` is the KL between the policy before the update and after it. It is stepped like
    ``torch.optim.lr_scheduler.ReduceLROnPlateau``: ``scheduler.step(stats)``.

    Args:
        optimizer: whose learning rates, numbers or tensors, are moved in place.
        target: the KL of an update to hold, > 0, in nats per ``unit``.
        factor: > 1.
        high, low: the band's edges, in targets; ``0 <= low < high``.
        min_lr, max_lr: the bounds, ``0 < min_lr <= max_lr``, between which the first learning rates
            must be. None: a hundredth and ten times each group's first learning rate, which are the
            source's bounds for its 1e-3.
        unit: the mean of a ``KLStats`` to read as ``current``: ``"token"`` or ``"sequence"``. A
            target that seems to be in the other one is warned of once, as by a controller's
            ``update``.
        process_group: the ranks that measure together, each of which must call ``step``; None for
            this process alone.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is NaN, infinite or out of its range, ``unit`` is unknown, or a first
            learning rate is outside the bounds.

    Source: N. Rudin et al., "Learning to Walk in Minutes Using Massively Parallel Deep
    Reinforcement Learning" (CoRL 2021, arXiv:2109.11978), and its code, rsl_rl, whose numbers are
    the defaults; skrl and rl_games have the same rule.
    """

    _kind = "adaptive-lr"
    _output = "last_lr"
    target: float

    def __init__(
        self,
        optimizer: Optimizer,
        target: float,
        *,
        factor: float = 1.5,
        high: float = 2.0,
        low: float = 0.5,
        min_lr: float | None = None,
        max_lr: float | None = None,
        unit: Unit = "token",
        process_group: ProcessGroup | None = None,
    ) -> None:
        KLReader.__init__(self, unit, process_group)
        self.target = check_number("target", target, above=0)
        self.factor = check_number("factor", factor, above=1)
        self.low = check_number("low", low, least=0)
        self.high = check_number("high", high, above=self.low)
        self.min_lr = None if min_lr is None else check_number("min_lr", min_lr, above=0)
        self.max_lr = (
            None if max_lr is None else check_number("max_lr", max_lr, least=self.min_lr or 0)
        )
        LRScheduler.__init__(self, optimizer)
        for group in optimizer.param_groups:
            self._bounds_of(group)

    def _bounds_of(self, group: dict[str, Any]) -> tuple[float, float]:
        """The bounds of a parameter group, by its first learning rate."""
        first = float(group.setdefault("initial_lr", float(group["lr"])))
        low = first / 100 if self.min_lr is None else self.min_lr
        high = first * 10 if self.max_lr is None else self.max_lr
        if not low <= first <= high:
            raise ValueError(
                f"min_lr and max_lr must be around the optimizer's learning rate {first}, got "
                f"{low} and {high}"
            )
        return low, high

    def step(
        self,
        current: float | Tensor | KLStats | None = None,
        n_steps: int | None = None,
        *,
        kl: KLName = "kl",
    ) -> None:
        """Move the learning rates after an update of the policy.

        Args:
            current: the update's mean KL in nats: a number, a 0-dim tensor, or a ``KLStats``, whose
                mean is taken by ``unit``. inf is above the band. NaN or -inf changes nothing: it is
                counted in ``skipped`` and warned of once. So is a ``KLStats`` that keeps no token.
                None changes nothing.
            n_steps: with ``process_group=``, the weight of this rank's number in the mean of all
                ranks; 1 by default, 0 on a rank without data.
            kl: which sums of a ``KLStats`` to go by, as of a controller's ``update``.

        Raises:
            TypeError: ``current`` is not a number, or ``n_steps`` not an integer.
            ValueError: ``n_steps`` is negative or beyond float64, or ``kl`` is unknown or not in
                ``current``.
            RuntimeError: the ranks have different learning rates, or a rank has died.
        """
        means = None
        if current is not None:
            if n_steps is not None:
                n_steps = check_count("n_steps", n_steps, least=0)
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            means = self._measure(current, n_steps, rates, kl)
            if means is not None:
                self._move(means.kl)
        self.last_epoch += 1
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        if means is not None:
            self._ask_unit(means, self.target)

    @property
    def last_lr(self) -> list[float]:
        """The learning rates of the parameter groups after the last ``step``."""
        return [float(rate) for rate in self._last_lr]

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates as they are."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def _move(self, kl: float) -> None:
        is_high = kl > self.high * self.target
        if not is_high and not 0 < kl < self.low * self.target:
            return
        groups = self.optimizer.param_groups
        rates = [self._moved(group, is_high) for group in groups]  # groups may share one tensor
        for group, lr in zip(groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _moved(self, group: dict[str, Any], is_high: bool) -> float:
        low, high = self._bounds_of(group)
        before = float(group["lr"])
        if is_high:
            return min(before, max(before / self.factor, low))
        return max(before, min(before * self.factor, high))

    def __repr__(self) -> str:
        names = (
            "last_lr",
            "target",
            "factor",
            "high",
            "low",
            "min_lr",
            "max_lr",
            "unit",
            "skipped",
        )
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({fields})"

    def state_dict(self) -> dict[str, Any]:
        """Return the learning rates and the counts, as plain JSON; ``unit`` and ``target`` too."""
        return self._framed(self._content())

    def _content(self) -> dict[str, Any]:
        return {"steps": self.last_epoch, "lr": self.last_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned; the optimizer's own state holds its learning rates.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` is of another kind, version or unit, lacks a key or has an unknown
                one, or has another number of parameter groups. The object is then unchanged.
        """
        skipped = self._check_state_frame(state)
        steps = check_count("state['steps']", state["steps"], least=0)
        rates = state["lr"]
        if not isinstance(rates, list):
            raise TypeError(f"state['lr'] must be a list, got {type(rates).__name__}")
        if len(rates) != len(self._last_lr):
            raise ValueError(
                f"state['lr'] must have {len(self._last_lr)} learning rates, got {len(rates)}"
            )
        self._last_lr = [check_number("state['lr']", rate, least=0) for rate in rates]
        self.last_epoch, self._skipped = steps, skipped
