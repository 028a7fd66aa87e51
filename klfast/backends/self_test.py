"""Known answers before the first use: a family of kernels that is wrong on a device serves no call.

A family is the kernels of a public function with gradient, or without. The first call that may go
to one has both checked: the calls of ``known_calls`` run, and what their results add up to is
compared with ``known_answers.json``. That is done once per device and function in a process, by one
thread while others wait.

The calls run in a thread of their own, because a new thread has no gradient mode, autocast, hooks
of saved tensors, modes of torch functions and of dispatch, transforms or tracers. On a GPU they run
on a stream that waits for nothing.

Nothing is checked while the current stream is captured, or in a backward, whose end the new
thread's own backward might wait for: the function counts as unchecked until the next call.
``KLFAST_SELF_CHECK=0`` turns it off. Not protected is another thread's capture in the mode
``"global"``, which the check's syncs end, as any sync of any thread does.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from klfast.autograd.context import may_need_gradient
from klfast.backends import known_calls
from klfast.backends.backend import Call
from klfast.ops.schemas import Ops
from klfast.types.device import DEVICES, is_capturing

RELATIVE = 1e-5
"""The error allowed in a checksum, relative to the sum of the absolute values that it adds. If
one entry of a bf16 gradient is rounded to the other neighbour, the checksum is off by 1e-6."""

ANSWERS = Path(__file__).with_name("known_answers.json")
REPORT = "run `klfast check` and open an issue with its output"

Outcomes = dict[str, str]  # "ok", "off" or "failed: ..." of each family


def families(op: str) -> tuple[str, ...]:
    """The families of a function: without gradient, and with it."""
    return op, f"{op}, gradient"


class FirstUse:
    """Known answers before the first use of ops on devices of the types ``kinds``."""

    def __init__(self, ops: Ops, *kinds: str) -> None:
        self._ops = ops
        self.kinds = kinds
        self._outcomes: dict[tuple[str, torch.device], Outcomes] = {}

    def problem(self, call: Call, device: torch.device) -> str | None:
        """Why the ops must not serve a call; None if they may. Checks what has not been checked."""
        ops, differentiated = known_calls.ops_of(call)
        needed = 2 if may_need_gradient(*differentiated) else 1
        reasons = [self._failure(op, device, needed) for op in ops]
        return next((reason for reason in reasons if reason is not None), None)

    def results(self, device: torch.device) -> dict[str, str]:
        """The outcome of each family on a device, or "unchecked"."""
        if device.type not in self.kinds:
            return {}
        unknown = "off" if _is_off() else "unchecked"
        return {
            family: self._outcomes.get((op, device), {}).get(family, unknown)
            for op in known_calls.FUNCTIONS
            for family in families(op)
        }

    def _failure(self, op: str, device: torch.device, needed: int) -> str | None:
        outcomes = self._outcomes.get((op, device)) or self._first_outcomes(op, device)
        for family, text in itertools.islice(outcomes.items(), needed):
            if text.startswith("failed"):
                return f"the known answers of {family} {text} on {device}; {REPORT}"
        return None

    # A question about the machine, whose answer torch.compile takes for a constant.
    _failure._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _first_outcomes(self, op: str, device: torch.device) -> Outcomes:
        """The outcomes, which are remembered; {} if nothing can be checked now."""
        # The thread of a device's backwards must neither run a check nor wait for one.
        is_in_backward = torch._C._current_graph_task_id() != -1
        if not _is_off() and (is_in_backward or is_capturing(device)):
            return {}
        with _lock:
            if (op, device) not in self._outcomes:
                try:
                    outcomes = self._check(op, device)
                # It says nothing about the kernels, so the next call checks again.
                except torch.OutOfMemoryError:
                    return {}
                self._outcomes[op, device] = outcomes
        return self._outcomes[op, device]

    def _check(self, op: str, device: torch.device) -> Outcomes:
        if _is_off():
            return dict.fromkeys(families(op), "off")
        answers = json.loads(ANSWERS.read_text(encoding="utf-8"))
        calls_at, function = known_calls.FUNCTIONS[op]
        run = functools.partial(function, ops=self._ops)

        def outcomes() -> Outcomes:
            calls = calls_at(lambda t: t.to(device).requires_grad_(t.is_floating_point()))
            results = (
                lambda: known_calls.results(calls, run),
                lambda: known_calls.gradients(calls, run, self._ops),
            )
            named = zip(families(op), results, strict=True)
            return {family: _outcome(found, answers[family]) for family, found in named}

        return _aside(device, outcomes)


_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


def _aside(device: torch.device, function: Callable[[], Outcomes]) -> Outcomes:
    """The result of a function in a new thread, without the two modes that all threads share:
    torch's note that it compiles, and the user's that forbids syncs.
    """

    def run() -> Outcomes:
        if (module := DEVICES[device.type].module) is not None:
            # For good: a new thread begins on device 0, which this process may have left alone.
            module.set_device(device)
            # A stream that waits for nothing of the user's. Blocks of a high priority go first on a
            # GPU that is busy, and few share a stream with them.
            module.set_stream(module.Stream(device, priority=-1))
        return function()

    is_compiling = torch.compiler._is_compiling_flag
    forbidden = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    torch.compiler._is_compiling_flag = False
    if forbidden:  # or torch would warn of a prototype
        torch.cuda.set_sync_debug_mode("default")
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()
    finally:
        torch.compiler._is_compiling_flag = is_compiling
        if forbidden:
            torch.cuda.set_sync_debug_mode(forbidden)


def checksums(result: Tensor) -> list[float]:
    """The weighted sum of each row, then the sum of absolute values of each."""
    # Weights tell two exchanged entries apart, which a plain sum would not.
    rows = result.double().reshape(-1, result.shape[-1] if result.dim() else 1)
    weights = 1 + torch.arange(rows.shape[1], dtype=torch.float32, device="cpu") % 61 / 61.0
    return torch.cat([(rows * weights).sum(-1), rows.abs().sum(-1)]).tolist()


def _outcome(found: Callable[[], dict[str, Tensor]], answers: Mapping[str, Sequence[float]]) -> str:
    """The outcome of a family: "ok", or "failed" with the error or the first wrong result."""
    try:
        results = found()
        sums = {name: checksums(results[name].cpu()) for name in answers}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        first_line, *_ = str(error).splitlines() or [""]
        return f"failed: {type(error).__name__}: {first_line}"
    for name, expected in answers.items():
        sizes = expected[len(expected) // 2 :]
        for got, want, size in zip(sums[name], expected, (*sizes, *sizes), strict=True):
            # Negated, so that NaN fails.
            if not abs(got - want) <= RELATIVE * size:
                off = abs(got - want) / size if size else math.inf
                return (
                    f"failed: {name}: got {got:.9g}, expected {want:.9g} (relative error {off:.2g})"
                )
    return "ok"


def _is_off() -> bool:
    return os.environ.get("KLFAST_SELF_CHECK") == "0"
