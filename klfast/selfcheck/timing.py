"""``klfast check --time``: six sizes beside eager PyTorch and a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from klfast.bench import logits, tokens
from klfast.bench.candidates import Candidate, candidate
from klfast.bench.cases import Case, make_inputs
from klfast.bench.gpu_timing import Cuda, alternate
from klfast.bench.measure import rotation
from klfast.bench.timing import interleave

ROUNDS = 7
_COPY, _EAGER = "copy", "eager"
_ROWS = {"cpu": 256}
_MANY_ROWS = 4096


@dataclass(frozen=True)
class TimeRow:
    """A backend's time of a size: medians, ``bytes`` as ``klfast bench`` counts them, and the
    bandwidth as a share of what a copy of the inputs has in the same rounds.
    """

    device: str
    case: str
    backend: str
    ms: float
    gb_per_s: float
    copy_share: float
    eager_ms: float
    bytes: int


def sizes(device: str) -> list[Case]:
    """The six sizes."""
    words = (_ROWS.get(device, _MANY_ROWS), 32_000)
    return [
        Case(tokens.OPS["forward"], "fp32", (4, 64)),
        Case(tokens.OPS["one-read"], "fp32", (512, 8192)),
        Case(tokens.OPS["one-read"], "bf16", (512, 8192)),
        Case(logits.OPS["kl-one-read"], "bf16", words),
        Case(logits.OPS["kl"], "fp32", words),
        Case(logits.OPS["logprob-two-pass"], "bf16", words),
    ]


def time_on(device: str, backends: Sequence[Any]) -> list[TimeRow]:
    """The rows of a device's backends, but for the reference where there is another."""
    fast = [backend for backend in backends if backend != "reference"] or list(backends)
    return [row for case in sizes(device) for row in _rows(case, device, fast)]


def _rows(case: Case, device: str, backends: Sequence[Any]) -> list[TimeRow]:
    inputs = make_inputs(case, rotation(case.input_bytes) if device == "cpu" else 1, device)
    memory = torch.empty_like(inputs[0].storage)
    eager = next(iter(case.op.eager().values()))
    candidates: dict[str, Candidate] = {
        **{backend: candidate(case.op, case.op.klfast(backend)) for backend in backends},
        _EAGER: candidate(case.op, eager),
        _COPY: lambda given: memory.copy_(given.storage),
    }
    if device == "cpu":
        timings = interleave(candidates, inputs, ROUNDS)
        seconds = {name: timing.median for name, timing in timings.items()}
    else:
        seconds = _on_gpu(candidates, inputs[0], torch.device(device))
    copied = 2 * case.input_bytes / seconds[_COPY]
    return [
        TimeRow(
            device,
            case.name,
            backend,
            seconds[backend] * 1e3,
            case.least_bytes / seconds[backend] / 1e9,
            case.least_bytes / seconds[backend] / copied,
            seconds[_EAGER] * 1e3,
            case.least_bytes,
        )
        for backend in backends
    ]


def _on_gpu(candidates: dict[str, Candidate], inputs: Any, place: torch.device) -> dict[str, float]:
    """By the device's clock, with cold caches."""
    with torch.cuda.device(place):
        gpu = Cuda(place)
        for call in candidates.values():
            call(inputs)
        queued = {
            name: partial(gpu.queue, partial(call, inputs), cold=True, head_start=1e-4)
            for name, call in candidates.items()
        }
        timed = alternate(queued, ROUNDS, gpu.synchronize)
    return {name: sorted(rounds)[len(rounds) // 2] for name, rounds in timed.items()}


TIMES = ("device", "case", "backend", "ms", "GB/s", "of a copy", "eager ms", "eager / klfast")
"""Headings of what ``cells_of`` makes of a row."""


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The text of a row's cells."""
    numbers = (row["ms"], row["gb_per_s"], row["copy_share"], row["eager_ms"])
    formats = ("{:.3g}", "{:.3g}", "{:.0%}", "{:.3g}", "{:.2g}")
    cells = zip(formats, (*numbers, row["eager_ms"] / row["ms"]), strict=True)
    return row["device"], row["case"], row["backend"], *(f.format(n) for f, n in cells)
