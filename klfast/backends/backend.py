"""A backend, as a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from klfast.args.penalty import PenaltyCall
from klfast.args.rollout import RolloutCall
from klfast.args.rows import RowsArgs
from klfast.stats.kl import KLStats
from klfast.stats.outputs import Outputs
from klfast.stats.rollout import RolloutCorrection

Call: TypeAlias = PenaltyCall | RowsArgs | RolloutCall  # the arguments of every public function


_ROLLOUT = "rollout_correction"


class FirstUse(Protocol):
    """The check that kernels compute right on a device, made before their first call there."""

    kinds: tuple[str, ...]  # the types of devices on which the kernels are checked

    def problem(self, call: Call, device: torch.device) -> str | None:
        """Why they must not serve a call on a device; None if they may."""

    def results(self, device: torch.device) -> dict[str, str]:
        """Each family of kernels with its outcome: "ok", "failed: ...", "unchecked" or "off"."""


class Backend(NamedTuple):
    """A backend: it computes calls whose arguments and values have been checked."""

    name: str
    why_not: Callable[[torch.device], str | None]
    """Why it cannot serve a device, with what to install; None if it can."""
    kl_penalty: Callable[[PenaltyCall], tuple[Tensor, KLStats | None]]
    rows: Callable[[RowsArgs], Outputs]
    """The functions over rows of a vocabulary: from logits and from hidden states."""
    rollout_correction: Callable[[RolloutCall], RolloutCorrection]
    rollout_devices: frozenset[str] | None = None
    """Types of devices on which it has kernels for ``rollout_correction``. None means all."""
    checks_in_kernel: frozenset[str] = frozenset()
    """Types of devices on which its kernels check values in their own read."""
    first_use: FirstUse | None = None
    """A check of a device's results before the first call that the backend serves there."""

    def lacks(self, function: str, device: torch.device) -> bool:
        """True if the backend has no kernels for a public function on a device."""
        types = self.rollout_devices
        return types is not None and function == _ROLLOUT and device.type not in types

    def why_not_call(self, call: Call, device: torch.device) -> str | None:
        """Why it cannot serve a call on a device; None if it can."""
        reason = self.why_not(device)
        if reason is None and isinstance(call, RolloutCall) and self.lacks(_ROLLOUT, device):
            return f"it has no kernels for {_ROLLOUT}; 'auto' takes a backend that serves it"
        first = self.first_use
        if reason is None and first is not None and device.type in first.kinds:
            reason = first.problem(call, device)
        return reason
