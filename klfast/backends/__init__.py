"""The backends, the order in which ``auto`` tries them, and the choice.

A backend is a module with ``unavailable(device) -> str | None`` (why it cannot serve the device,
with what to install; None if it can) and ``kl_penalty(call) -> (Tensor, KLStats | None)``.
A new backend is one such file and one row here.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Protocol, cast

import torch

from klfast.checks import check_choice

if TYPE_CHECKING:
    from klfast.call import KLCall
    from klfast.stats import KLStats

MODULES = {
    "native": "klfast.backends.native",
    "reference": "klfast.backends.reference",
}
"""Name -> module, in the order that ``auto`` tries them. The last serves every device."""


class Backend(Protocol):
    """What a backend module offers."""

    def unavailable(self, device: torch.device) -> str | None: ...

    def kl_penalty(self, call: KLCall) -> tuple[torch.Tensor, KLStats | None]: ...


_chosen: dict[tuple[str, str], Backend] = {}


def load(name: str) -> Backend:
    """The module of a backend."""
    return cast(Backend, importlib.import_module(MODULES[name]))


def why_not(device: torch.device) -> dict[str, str | None]:
    """For each backend, why it cannot serve ``device``; None if it can."""
    return {name: load(name).unavailable(device) for name in MODULES}


def first_available(reasons: dict[str, str | None]) -> str:
    """The backend that ``auto`` takes, given what ``why_not`` says."""
    return next(name for name, reason in reasons.items() if reason is None)


def resolve(backend: str, device: torch.device) -> Backend:
    """The backend to use. ``auto`` takes the first that can; a name never falls back.

    Raises:
        ValueError: an unknown name.
        RuntimeError: a backend asked for by name that cannot serve the device, and why.
    """
    chosen = _chosen.get((backend, device.type))
    if chosen is None:
        chosen = _chosen[(backend, device.type)] = _choose(backend, device)
    return chosen


def _choose(backend: str, device: torch.device) -> Backend:
    check_choice("backend", backend, ("auto", *MODULES))
    if backend != "auto":
        module = load(backend)
        if (reason := module.unavailable(device)) is not None:
            raise RuntimeError(f"backend {backend!r} cannot run on {device.type}: {reason}")
        return module
    reasons = why_not(device)
    name = first_available(reasons)
    if name == "reference":
        because = "; ".join(f"{other}: {reason}" for other, reason in reasons.items() if reason)
        warnings.warn(
            f"klfast uses its slow reference backend on {device.type} ({because})",
            RuntimeWarning,
            stacklevel=4,
        )
    return load(name)
