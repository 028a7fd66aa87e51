"""The backends, the order in which ``auto`` tries them, and the choice.

A backend is a module with ``unavailable(device) -> str | None`` (why it cannot serve the device,
with what to install; None if it can), ``kl_penalty(call) -> (Tensor, KLStats | None)``, and over
logits ``token_logprobs(call)`` and ``kl_divergence(call)``. A new backend is one such file and one
row here.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Protocol

import torch

from klfast.backends import native, triton
from klfast.backends.reference import penalty as reference
from klfast.checks.arguments import check_choice

if TYPE_CHECKING:
    from klfast.call import KLCall
    from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
    from klfast.logits.outputs import KLOutputs
    from klfast.stats import KLStats


class Backend(Protocol):
    """What a backend module offers."""

    def unavailable(self, device: torch.device) -> str | None: ...

    def kl_penalty(self, call: KLCall) -> tuple[torch.Tensor, KLStats | None]: ...

    def token_logprobs(
        self, call: TokenLogprobsCall
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def kl_divergence(self, call: KLDivergenceCall) -> KLOutputs: ...


MODULES: dict[str, Backend] = {"native": native, "triton": triton, "reference": reference}
"""In the order that ``auto`` tries them. The last serves every device."""

_told: set[str] = set()


def why_not(device: torch.device) -> dict[str, str | None]:
    """For each backend, why it cannot serve ``device``; None if it can."""
    return {name: module.unavailable(device) for name, module in MODULES.items()}


def first_available(reasons: dict[str, str | None]) -> str:
    """The backend that ``auto`` takes, given what ``why_not`` says."""
    return next(name for name, reason in reasons.items() if reason is None)


def resolve(backend: str, device: torch.device) -> Backend:
    """The backend to use. ``auto`` takes the first that can; a name never falls back.

    Raises:
        ValueError, TypeError: an unknown name.
        RuntimeError: a backend asked for by name that cannot serve the device, and why.
    """
    check_choice("backend", backend, ("auto", *MODULES))
    if backend == "auto":
        module = next(m for m in MODULES.values() if m.unavailable(device) is None)
        if module is reference and not torch.compiler.is_compiling():
            _tell_of_reference(device)
        return module
    module = MODULES[backend]
    if (reason := module.unavailable(device)) is not None:
        raise RuntimeError(f"backend {backend!r} cannot run on {device.type}: {reason}")
    return module


def _tell_of_reference(device: torch.device) -> None:
    """Warn, once for each kind of device, that ``auto`` has only the slow backend left."""
    if device.type in _told:
        return
    _told.add(device.type)
    reasons = why_not(device).items()
    because = "; ".join(f"{name}: {reason}" for name, reason in reasons if reason is not None)
    warnings.warn(
        f"klfast uses its slow reference backend on {device.type} ({because})",
        RuntimeWarning,
        stacklevel=5,
    )
