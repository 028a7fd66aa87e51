"""The backends, the order in which ``auto`` tries them, and the choice.

A new backend is a ``Backend`` and one row in ``order``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from klfast.args.checks import check_choice
from klfast.args.heads import Hidden
from klfast.args.penalty import PenaltyCall
from klfast.args.rollout import RolloutCall
from klfast.args.rows import RowsArgs
from klfast.args.values import are_checked, are_tracing, can_be_read
from klfast.backends.backend import Backend, Call
from klfast.backends.order import ORDER
from klfast.stats.kl import KLStats
from klfast.stats.outputs import Outputs
from klfast.stats.rollout import RolloutCorrection
from klfast.types.callers import caller

C = TypeVar("C", PenaltyCall, RowsArgs, RolloutCall)
R = TypeVar("R")

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
    """The outcome of each family of kernels that is checked before it first serves ``device``."""
    outcomes: dict[str, str] = {}
    for backend in BACKENDS.values():
        if backend.first_use is not None and backend.why_not(device) is None:
            outcomes |= backend.first_use.results(device)
    return outcomes


def resolve(name: str, device: torch.device, call: Call | None = None) -> Backend:
    """The backend to use. ``auto`` takes the first that can; a name never falls back.

    Kernels may be right for one ``call`` on the device, and wrong for another.

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


def choose(name: str, call: Call, device: torch.device) -> Backend:
    """The backend to use, after the check of the values that it does not check itself."""
    # Mostly the first backend serves, or the one that is named, and nothing needs to be said.
    backend: Backend | None = next(iter(BACKENDS.values()))
    if name != "auto":
        backend = BACKENDS.get(name) if isinstance(name, str) else None
    if backend is None or backend.why_not_call(call, device) is not None:
        backend = resolve(name, device, call)
    if device.type not in backend.checks_in_kernel and are_checked(device):
        call.check_values()
    return backend


def kl_penalty(name: str, call: PenaltyCall) -> tuple[Tensor, KLStats | None]:
    """Compute a penalty, with the named backend or the choice of ``auto``."""
    device = call.logprobs.device
    return _computed(choose(name, call, device).kl_penalty, call, device)


def rows(name: str, args: RowsArgs) -> Outputs:
    """Compute the outputs of a call over rows, as ``kl_penalty``."""
    backend, device = choose(name, args, args.device), args.device
    # A backend would use bad values in matmuls first, or does not read all of a teacher's ids.
    if args.teacher is not None or isinstance(args.source, Hidden):
        first = args.source.tensors[0]
        if first is not None and can_be_read(first):
            args.check_values()
    return _computed(backend.rows, args, device)


def rollout_correction(name: str, call: RolloutCall) -> RolloutCorrection:
    """Compute what there is between sampler and trainer, as ``kl_penalty``."""
    device = call.logprobs.device
    return _computed(choose(name, call, device).rollout_correction, call, device)


def _computed(function: Callable[[C], R], call: C, device: torch.device) -> R:
    """The result of a call. The checks name the argument of a value that a kernel refuses."""
    try:
        return function(call)
    except RuntimeError:
        if device.type == "cpu" and not are_tracing():
            call.check_values()
        else:
            call.check_numbers()
        raise


def _tell(
    backend: Backend, device: torch.device, reasons: dict[str, str], call: Call | None
) -> None:
    """Warn, once for each kind of device, that ``auto`` has only the slow backend left; and of each
    family of kernels that is refused, whichever backend takes its place.

    Nothing is said where no other backend has kernels for the call: the reference is then meant to
    serve it.
    """
    function = "rollout_correction" if isinstance(call, RolloutCall) else ""
    faster = [name for name in reasons if not BACKENDS[name].lacks(function, device)]
    refused = [name for name in faster if BACKENDS[name].why_not(device) is None]
    is_slow = backend.name == "reference" and bool(faster)
    if not is_slow and not refused:
        return
    # The reasons are part of the key: a family that is refused later is another message.
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
