"""The state of a controller on a device, moved without reading anything back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from klfast.control.arithmetic import Tensors
from klfast.control.ranks import COUNT, EQUAL, GIVEN, KL, N_STEPS, folded
from klfast.control.reading import on_device
from klfast.control.rules import Plan, advance


class DeviceForm:
    """A rule's state in one fp64 tensor that is updated in place.

    ``update`` launches kernels and waits for none, so it can be captured in a CUDA graph; the
    addresses of ``state``, ``value``, ``skipped`` and ``disagreements`` never change.

    Args:
        plan: the rule and the options around it.
        settings: the controller, whose numbers become tensors.
        state: numbers by name, ``"value"`` first.
        device: where.

    Attributes:
        value: the coefficient, a view of ``state``.
        skipped: int64, how many KLs were not finite.
        disagreements: int64, in how many updates the ranks had different coefficients.
    """

    def __init__(
        self, plan: Plan, settings: Any, state: dict[str, float], device: torch.device
    ) -> None:
        self.plan = plan
        self.on = Tensors(device)
        self.its = settings_on(settings, device)
        self.names = tuple(state)
        self.state = torch.tensor([*state.values()], dtype=torch.float64, device=device)
        self.value = self.state[0]
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.disagreements = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, kl: Tensor, n_steps: Tensor, is_given: Tensor | None = None) -> None:
        """Move by a KL and a number of sequences, 0-dim fp64; nothing if either is not valid.

        What is not valid is counted, unless ``is_given`` says that nothing was measured.
        """
        state = dict(zip(self.names, self.state.unbind(), strict=True))
        new = advance(self.on, self.plan, self.its, state, kl, n_steps)
        is_valid = kl.isfinite() & n_steps.isfinite() & (n_steps >= 0)
        moved = torch.stack([new[name] for name in self.names])
        self.state.copy_(torch.where(is_valid, moved, self.state))
        self.skipped.add_(~is_valid if is_given is None else ~is_valid & is_given)

    def update_of_ranks(self, table: Tensor) -> None:
        """Move by what all ranks measured, see :class:`klfast.control.ranks.Measured`."""
        sums = folded(table)
        equal = table[:, EQUAL]
        self.disagreements.add_((equal != equal[0]).any())
        self.update(sums[KL] / sums[COUNT], sums[N_STEPS], sums[GIVEN] > 0)

    def read(self) -> dict[str, float]:
        """The state as floats; waits for the device."""
        return dict(zip(self.names, self.state.tolist(), strict=True))

    def write(self, state: dict[str, float], skipped: int) -> None:
        """Set the state in place, so that a captured graph goes on from it."""
        values = [state[name] for name in self.names]
        self.state.copy_(torch.tensor(values, dtype=torch.float64))
        self.skipped.fill_(skipped)

    def __getstate__(self) -> dict[str, Any]:
        # A shallow copy shares no tensor that is updated in place.
        own = {name: getattr(self, name).clone() for name in ("state", "skipped", "disagreements")}
        return {**vars(self), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.value = self.state[0]


def settings_on(settings: Any, device: torch.device) -> SimpleNamespace:
    """The numbers among an object's attributes as tensors; an attribute's own likewise."""
    converted: dict[str, Any] = {}
    bounds = {"min_coef": settings.min_coef, "highest": settings.highest}
    for name, value in {**vars(settings), **bounds}.items():
        if isinstance(value, (int, float)):
            converted[name] = on_device(value, device)
        elif hasattr(value, "highest"):
            converted[name] = settings_on(value, device)
    return SimpleNamespace(**converted)
