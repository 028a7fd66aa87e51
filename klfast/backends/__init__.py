"""The backends, the order in which ``auto`` tries them, and the choice.

A new backend is a ``Backend`` and one row in ``order``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from klfast.args.checks import check_choice
from klfast.args.rows import RowsArgs
from klfast.args.values import are_checked, can_be_read
from klfast.backends.backend import Backend, Call
from klfast.backends.order import ORDER
from klfast.stats.outputs import Outputs
from klfast.types.callers import caller

BACKENDS = {backend.name: backend for backend in ORDER}
"""In the order that ``auto`` tries them. The last serves every device."""

_told: set[tuple[str, ...]] = set()


def why_not(device: torch.device) -> dict[str, str | None]:
    """For each backend, why it cannot serve ``device``; None if it can."""
    return {name: backend.why_not(device) for name, backend in BACKENDS.items()}


def first_available(
    reasons: Mapping[str, str | None], device: torch.device, function: str = ""
) -> str:
    """The backend that ``auto`` takes for a function on a device, given its ``why_not``."""
    return next(
        name
        for name, reason in reasons.items()
        if reason is None and not BACKENDS[name].lacks(function, device)
    )


def first_use(device: torch.device) -> dict[str, str]:
    """The outcomes of the kernels that are checked before they first serve a call on ``device``:
    each family's outcome.
    """
    outcomes: dict[str, str] = {}
    for backend in BACKENDS.values():
        if backend.first_use is not None and backend.why_not(device) is None:
            outcomes |= backend.first_use.results(device)
    return outcomes


def resolve(name: str, device: torch.device, call: Call | None = None) -> Backend:
    """The backend to use. ``auto`` takes the first that can; a name never falls back.

    Args:
        name: of the backend, or ``auto``.
        device: that it is to serve.
        call: the call there, if there is one: kernels may be right for one and wrong for another.

    Raises:
        ValueError, TypeError: an unknown name.
        RuntimeError: a backend asked for by name that cannot serve the device, and why.
    """
    check_choice("backend", name, ("auto", *BACKENDS))
    reasons: dict[str, str] = {}
    for backend in BACKENDS.values():
        if name not in ("auto", backend.name):
            continue
        reason = backend.why_not(device) if call is None else backend.why_not_call(call, device)
        if reason is None:
            if reasons and not torch.compiler.is_compiling():
                _tell(backend, device, reasons, call)
            return backend
        reasons[backend.name] = reason
    raise RuntimeError(f"backend {name!r} cannot run on {device.type}: {reasons[name]}")


def _named(name: object) -> Backend | None:
    return BACKENDS.get(name) if isinstance(name, str) else None


def choose(name: str, call: Call) -> Backend:
    """The backend to use, after the check of the values that it does not check itself."""
    tensor = call.first()
    device = tensor.device
    # Mostly the first backend serves, or the one that is named, and nothing needs to be said.
    backend = next(iter(BACKENDS.values())) if name == "auto" else _named(name)
    if backend is None or backend.why_not_call(call, device) is not None:
        backend = resolve(name, device, call)
    if are_checked(tensor, in_kernel=device.type in backend.checks_in_kernel):
        call.check_values()
    return backend


def rows(name: str, args: RowsArgs) -> Outputs:
    """Compute the outputs of a call over rows, with the named backend or the choice of ``auto``."""
    backend = choose(name, args)
    if args.are_checked_first() and can_be_read(args.first()):
        args.check_values()
    try:
        return backend.rows(args)
    except RuntimeError:
        args.explain()
        raise


def _tell(
    backend: Backend, device: torch.device, reasons: dict[str, str], call: Call | None
) -> None:
    """Warn, once for each kind of device, that ``auto`` has only the slow backend left; and of each
    family of kernels that is refused, whichever backend takes its place.

    Nothing is said where no other backend has kernels for the call: the reference is then meant to
    serve it.
    """
    faster = [
        name for name in reasons if call is None or not BACKENDS[name].lacks_call(call, device)
    ]
    refused = [name for name in faster if BACKENDS[name].why_not(device) is None]
    is_slow = backend.name == "reference" and bool(faster)
    if not is_slow and not refused:
        return
    if (key := (device.type, *reasons.values())) in _told:
        return
    _told.add(key)
    because = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    slow = "slow " if is_slow else ""
    warnings.warn(
        f"klfast uses its {slow}{backend.name} backend on {device.type} ({because})",
        RuntimeWarning,
        stacklevel=caller().stacklevel,
    )
