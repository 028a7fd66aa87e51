"""The state of a controller on a device, moved without reading anything back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from klfast.controllers.arithmetic import Tensors
from klfast.controllers.current import on_device
from klfast.controllers.measured import COUNT, EQUAL, GIVEN, KL, N_STEPS
from klfast.controllers.rules import Plan, advance
from klfast.dtypes import wide_dtype
from klfast.ranks import folded


class DeviceState:
    """A rule's state in tensors that are updated in place, fp64 where the device has it.

    ``update`` launches kernels and waits for none, so it can be captured in a CUDA graph; the
    addresses of its tensors never change.

    Args:
        plan: the rule and the options around it.
        settings: the controller, whose numbers become tensors.
        state: numbers by name, ``"value"`` first.
        device: where.

    Attributes:
        coefficient: [1].
        value: the same memory, 0-dim.
        memory: [M], what else the rule remembers.
        skipped: int64, how many KLs were not finite.
        disagreements: int64, in how many updates the ranks had different coefficients.
    """

    @torch.inference_mode(False)  # tensors of inference mode cannot be updated outside of it
    def __init__(
        self, plan: Plan, settings: Any, state: dict[str, float], device: torch.device
    ) -> None:
        self.plan = plan
        self.ops = Tensors(device)
        self.settings = settings_on(settings, device)
        value, *memory = state.values()
        self.names = tuple(state)[1:]
        # torch.compile (2.13) drops what is written into a 0-dim fp64 tensor of the CPU, and takes
        # no views into a tensor whose size it generalises: so a size of 1, and memory beside it.
        dtype = wide_dtype(device)
        self.coefficient = torch.tensor([value], dtype=dtype, device=device)
        self.value = self.coefficient[0]
        self.memory = torch.tensor(memory, dtype=dtype, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.disagreements = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, kl: Tensor, n_steps: Tensor, is_given: Tensor | None = None) -> None:
        """Move by a KL and a number of sequences, 0-dim; nothing if either is not valid.

        What is not valid is counted, unless ``is_given`` says that nothing was measured.
        """
        memory = dict(zip(self.names, self.memory.unbind(), strict=True))
        new = advance(
            self.ops, self.plan, self.settings, {"value": self.value, **memory}, kl, n_steps
        )
        is_valid = kl.isfinite() & n_steps.isfinite() & (n_steps >= 0)
        if self.names:
            moved = torch.stack([new[name] for name in self.names])
            self.memory.copy_(torch.where(is_valid, moved, self.memory))
        self.coefficient.copy_(torch.where(is_valid, new["value"], self.coefficient))
        self.skipped.add_(~is_valid if is_given is None else ~is_valid & is_given)

    def update_of_ranks(self, table: Tensor) -> None:
        """Move by what all ranks measured, see :class:`klfast.controllers.measured.Measured`."""
        sums = folded(table)
        equal = table[:, EQUAL]
        self.disagreements.add_((equal != equal[0]).any())
        self.update(sums[KL] / sums[COUNT], sums[N_STEPS], sums[GIVEN] > 0)

    def read(self) -> dict[str, float]:
        """The state as floats; waits for the device."""
        numbers = torch.cat([self.coefficient, self.memory]).tolist()
        return dict(zip(("value", *self.names), numbers, strict=True))

    def write(self, state: dict[str, float], skipped: int) -> None:
        """Set the state in place, so that a captured graph goes on from it."""
        self.coefficient.fill_(state["value"])
        memory = [state[name] for name in self.names]
        self.memory.copy_(self.memory.new_tensor(memory))
        self.skipped.fill_(skipped)

    def __getstate__(self) -> dict[str, Any]:
        """A copy shares no tensor that is updated in place."""
        own = ("coefficient", "memory", "skipped", "disagreements")
        return {**vars(self), **{name: getattr(self, name).clone() for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.value = self.coefficient[0]


def settings_on(settings: Any, device: torch.device) -> SimpleNamespace:
    """The numbers among a controller's attributes as tensors; those of one within it likewise."""
    converted: dict[str, Any] = {}
    bounds = {"lowest": settings.lowest, "highest": settings.highest}
    for name, value in {**vars(settings), **bounds}.items():
        if isinstance(value, (int, float)):
            converted[name] = on_device(value, device)
        elif hasattr(value, "highest"):  # a controller within it, as a scheduled one has
            converted[name] = settings_on(value, device)
    return SimpleNamespace(**converted)
