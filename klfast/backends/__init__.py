"""The backends, the order in which ``auto`` tries them, and the choice.

A new backend is a ``Backend`` and one row in ``order``.
"""

from __future__ import annotations

import warnings

import torch

from klfast.backends.backend import Backend
from klfast.backends.order import ORDER
from klfast.call import PenaltyCall
from klfast.callers import caller
from klfast.checks.arguments import check_choice
from klfast.checks.values import are_checked
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.rollout.call import RolloutCall

BACKENDS = {backend.name: backend for backend in ORDER}
"""In the order that ``auto`` tries them. The last serves every device."""

_told: set[str] = set()


def why_not(device: torch.device) -> dict[str, str | None]:
    """For each backend, why it cannot serve ``device``; None if it can."""
    return {name: backend.why_not(device) for name, backend in BACKENDS.items()}


def first_available(reasons: dict[str, str | None]) -> str:
    """The backend that ``auto`` takes, given what ``why_not`` says."""
    return next(name for name, reason in reasons.items() if reason is None)


def resolve(name: str, device: torch.device) -> Backend:
    """The backend to use. ``auto`` takes the first that can; a name never falls back.

    Raises:
        ValueError, TypeError: an unknown name.
        RuntimeError: a backend asked for by name that cannot serve the device, and why.
    """
    check_choice("backend", name, ("auto", *BACKENDS))
    if name == "auto":
        backend = next(b for b in BACKENDS.values() if b.why_not(device) is None)
        if backend.name == "reference" and not torch.compiler.is_compiling():
            _tell_of_reference(device)
        return backend
    backend = BACKENDS[name]
    if (reason := backend.why_not(device)) is not None:
        raise RuntimeError(f"backend {name!r} cannot run on {device.type}: {reason}")
    return backend


def choose(
    name: str, call: PenaltyCall | TokenLogprobsCall | KLDivergenceCall | RolloutCall
) -> Backend:
    """The backend to use, after the check of the values that it does not check itself."""
    backend = resolve(name, call.first().device)
    in_kernel = call.first().device.type in backend.checks_in_kernel
    if are_checked(call.first(), in_kernel=in_kernel):
        call.check_values()
    return backend


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
        stacklevel=caller().stacklevel,
    )
