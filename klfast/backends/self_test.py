"""Known answers before the first use: a family of kernels that is wrong on a device serves no call.

A family is the kernels of a public function with gradient, or without. The first call that may go
to one has both checked: the calls of ``first_calls`` run on a stream that waits for nothing, their
results come back in one transfer, and what they add up to is compared with ``known_answers.json``.
That is done once per device and function in a process, by one thread while others wait.

Nothing is checked while the current stream is captured, or while somebody traces (torch.compile
asks as it compiles, outside of its trace): the function counts as unchecked until the next call.
``KLFAST_SELF_CHECK=0`` turns it off. Not protected is a capture that this transfer's sync ends: of
another thread in the mode ``"global"``, as by any sync of any thread, or on a stream of this thread
that is not the current one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from klfast.backends import known_calls
from klfast.calls import Call
from klfast.ops.autograd import may_need_gradient
from klfast.ops.table import Ops

RELATIVE = 1e-5
"""The error allowed to a checksum, relative to the sum of the absolute values that it
adds. A gradient in bf16 of which one entry is rounded the other way is off by 1e-6."""

ANSWERS = Path(__file__).with_name("known_answers.json")
REPORT = "run `klfast check` and open an issue with its output"

Outcome = tuple[str, ...]
"""The outcomes of a function without and with gradient: "ok", "off" or "failed: ..."."""
Results = dict[str, Tensor] | Exception
"""The results of a family's calls; or what they raised."""


def families(op: str) -> tuple[str, ...]:
    """The families of a function, in the order of an ``Outcome``."""
    return (op, f"{op}, gradient") if op in known_calls.GRADIENTS else (op,)


class FirstUse:
    """Known answers before the first use of ops on a device.

    Args:
        ops: whose kernels are checked.
        applies: whether they are to be checked on a device.
    """

    def __init__(self, ops: Ops, applies: Callable[[torch.device], bool]) -> None:
        self._ops = ops
        self._applies = applies
        self._outcomes: dict[tuple[str, torch.device], Outcome] = {}
        self.indices: set[int] = set()
        """The indices of the devices on which every family of ``kl_penalty`` may be used."""
        self._passed: set[tuple[type, torch.device]] = set()
        """The kinds of calls of which every family may be used: no more is asked."""

    def problem(self, call: Call) -> str | None:
        """Why the ops must not serve a call; None if they may. Checks what has not been checked."""
        device = call.first().device
        if not self._applies(device):
            return None
        is_compiling = torch.compiler.is_compiling()  # which would guard a set
        if not is_compiling and (type(call), device) in self._passed:
            return None
        ops, differentiated = known_calls.ops_of(call)
        needed = 2 if may_need_gradient(*differentiated) else 1
        reasons = [self._failure(op, device, needed) for op in ops]
        outcomes = [self._outcomes.get((op, device), ()) for op in ops]
        if not is_compiling and all(map(_is_right, outcomes)):
            self._passed.add((type(call), device))
        return next((reason for reason in reasons if reason is not None), None)

    def results(self, device: torch.device) -> dict[str, str]:
        """The outcome of each family on a device, or "unchecked"."""
        if not self._applies(device):
            return {}
        unknown = ("off" if _is_off() else "unchecked",) * 2
        known = {op: self._outcomes.get((op, device), unknown) for op in known_calls.CALLS}
        return {
            family: outcome
            for op, outcomes in known.items()
            for family, outcome in zip(families(op), outcomes, strict=False)
        }

    def _failure(self, op: str, device: torch.device, needed: int) -> str | None:
        outcome = self._outcomes.get((op, device))
        if outcome is None:
            outcome = self._first_outcome(op, device)
        for family, text in zip(families(op), outcome[:needed], strict=False):
            if _has_failed(text):
                return f"the known answers of {family} {text} on {device}; {REPORT}"
        return None

    # A question about the machine, whose answer torch.compile takes for a constant.
    _failure._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _first_outcome(self, op: str, device: torch.device) -> Outcome:
        """The outcomes, which are remembered; () if nothing can be checked now."""
        if not _is_off() and (_is_traced() or _is_capturing(device)):
            return ()
        with _lock:
            if (op, device) not in self._outcomes:
                try:
                    outcome = ("off",) * 2 if _is_off() else self._check(op, device)
                except torch.OutOfMemoryError:
                    return ()
                if op == "kl_penalty" and _is_right(outcome):
                    self.indices.add(device.index or 0)
                self._outcomes[op, device] = outcome
        return self._outcomes[op, device]

    def _check(self, op: str, device: torch.device) -> Outcome:
        answers = json.loads(ANSWERS.read_text(encoding="utf-8"))
        kept = []  # until they have been copied

        def place(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor.to(device, non_blocking=True)

        with _as_nobody_sees(), _aside(device):
            calls = known_calls.CALLS[op](place)
            found = [_results(known_calls.results, op, calls, self._ops)]
            if op in known_calls.GRADIENTS:
                found += [_results(known_calls.gradients, op, calls, self._ops)]
            found = _on_host(found)
            named = zip(families(op), found, strict=True)
            return tuple(judge(results, answers[family]) for family, results in named)


_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


def checksums(result: Tensor) -> list[float]:
    """The weighted sum of each row, then the sum of absolute values of each."""
    rows = result.double().reshape(-1, result.shape[-1] if result.dim() else 1)
    sums = (rows * _weights()[: rows.shape[1]]).sum(-1), rows.abs().sum(-1)
    return torch.cat(sums).tolist()


@functools.cache
def _weights() -> Tensor:
    """The weights of places in a row."""
    return 1 + torch.arange(1 << 14, device="cpu") % 61 / 61.0


def judge(results: Results, answers: Mapping[str, Sequence[float]]) -> str:
    """The outcome of a family: "ok", or "failed" with the first result that is wrong."""
    if isinstance(results, Exception):
        first_line, *_ = str(results).splitlines() or [""]
        return f"failed: {type(results).__name__}: {first_line}"
    for name, expected in answers.items():
        sizes = expected[len(expected) // 2 :]
        found = zip(checksums(results[name]), expected, (*sizes, *sizes), strict=True)
        for got, want, size in found:
            if not abs(got - want) <= RELATIVE * size:
                error = abs(got - want) / size if size else math.inf
                return (
                    f"failed: {name}: got {got:.9g}, expected {want:.9g} "
                    f"(relative error {error:.2g})"
                )
    return "ok"


def _has_failed(text: str) -> bool:
    return text.startswith("failed")


def _is_right(outcome: Outcome) -> bool:
    return bool(outcome) and not any(map(_has_failed, outcome))


def _results(run: Callable[..., dict[str, Tensor]], *arguments: object) -> Results:
    try:
        return run(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return error


def _on_host(found: list[Results]) -> list[Results]:
    """Results in the memory of the host, by one transfer of all their bytes, the one sync."""
    tensors = [t for results in found if isinstance(results, dict) for t in results.values()]
    if not tensors:
        return found
    sizes = [(tensor.nbytes + 7) // 8 * 8 for tensor in tensors]
    together = tensors[0].new_empty(sum(sizes), dtype=torch.uint8)
    for tensor, room in zip(tensors, together.split(sizes), strict=True):
        room[: tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
    rooms = iter(together.cpu().split(sizes))
    return [
        {name: _read(next(rooms), tensor) for name, tensor in results.items()}
        if isinstance(results, dict)
        else results
        for results in found
    ]


def _read(room: Tensor, like: Tensor) -> Tensor:
    return room[: like.nbytes].view(like.dtype).view(like.shape)


def _is_off() -> bool:
    return os.environ.get("KLFAST_SELF_CHECK") == "0"


def _is_traced() -> bool:
    """Whether what is done here would be recorded, or transformed."""
    keys = torch._C._TorchDispatchModeKey
    modes = map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or any(mode is not None for mode in modes)
    )


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _as_nobody_sees() -> Iterator[None]:
    """Without gradients, and outside of the modes of torch functions and of dispatch."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a stream that waits for nothing of the user's, who may have forbidden syncs. Blocks of a
    high priority go first on a GPU that is busy, and few share a stream with them.
    """
    if device.type != "cuda":
        yield
        return
    forbidden = torch.cuda.get_sync_debug_mode()
    if forbidden:  # or torch would warn of a prototype
        torch.cuda.set_sync_debug_mode("default")
    try:
        with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
            yield
    finally:
        if forbidden:
            torch.cuda.set_sync_debug_mode(forbidden)
