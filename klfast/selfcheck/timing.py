"""``klfast check --time``: six sizes beside eager PyTorch and a copy of the same bytes."""

from __future__ import annotations

import math
import statistics
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.api import kl_penalty
from klfast.logits.api import kl_divergence, token_logprobs
from klfast.selfcheck import eager
from klfast.selfcheck.clock import Cuda, alternate, calls_per_timing, rotation, timers_of

ROUNDS = 7
_COPY, _EAGER = "copy", "eager"
_ROWS = {"cpu": 256}
_MANY_ROWS = 4096
_SPREAD = 0.1  # standard deviation of the log-ratio, in nats
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TimeRow:
    """A backend's time of a size: medians, ``bytes`` that must move at the least, and the bandwidth
    as a share of what a copy of the inputs has in the same rounds.
    """

    device: str
    case: str
    backend: str
    ms: float
    gb_per_s: float
    copy_share: float
    eager_ms: float
    bytes: int


class Inputs(NamedTuple):
    """A set of inputs: tensors that lie one after the other in ``storage``."""

    tensors: tuple[Tensor, ...]
    storage: Tensor


@dataclass(frozen=True)
class Size:
    """A call and the size of its inputs.

    Attributes:
        name: the call's.
        ours, eager: klfast's function, which takes a ``backend`` too, and what eager PyTorch has in
            its place.
        dtype: of the first two tensors, or of the first, if the second holds token ids.
        shape: sequences x tokens, or tokens x words.
        over: ``"logprobs"``, ``"pairs"`` or ``"tokens"``: what the tensors are.
        reads: how often the inputs must be read at the least; 0 without a gradient, which reads
            them once and writes nothing of their size.
    """

    name: str
    ours: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    dtype: str
    shape: tuple[int, int]
    over: str
    reads: int = 0

    @property
    def case(self) -> str:
        return f"{self.name} {self.dtype} {self.shape[0]}x{self.shape[1]}"

    @property
    def layout(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor."""
        large = (_DTYPES[self.dtype], self.shape)
        if self.over == "tokens":
            return [large, (torch.int64, self.shape[:1])]
        return [large, large, *([(torch.bool, self.shape)] * (self.over == "logprobs"))]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [math.prod(shape) * dtype.itemsize for dtype, shape in self.layout]

    @property
    def least_bytes(self) -> int:
        """The least bytes that any implementation moves: its reads, and the gradient if any."""
        return max(1, self.reads) * sum(self.sizes) + self.sizes[0] * bool(self.reads)

    def inputs(self, device: str) -> Inputs:
        """Random ones."""
        storage = torch.empty(sum(self.sizes), dtype=torch.uint8, device=device)
        parts = zip(storage.split(self.sizes), self.layout, strict=True)
        tensors = tuple(part.view(dtype).view(shape) for part, (dtype, shape) in parts)
        tensors[0].uniform_(-8, 0)
        if self.over == "tokens":
            tensors[1].random_(self.shape[1])
        else:
            tensors[1].normal_(std=_SPREAD).add_(tensors[0])
        for mask in tensors[2:]:
            mask.bernoulli_(0.8)
        tensors[0].requires_grad_(bool(self.reads))
        return Inputs(tensors, storage)

    def run(self, function: Callable[..., Tensor], inputs: Inputs) -> Any:
        """A call, and the backward behind it if there is one."""
        result = function(*inputs.tensors)
        if not self.reads:
            return result
        return torch.autograd.grad(result, inputs.tensors[0], torch.ones_like(result))


def sizes(device: str) -> list[Size]:
    """The six sizes."""
    words = (_ROWS.get(device, _MANY_ROWS), 32_000)
    sums = partial(kl_penalty, reduction="seq-sum")
    mean = partial(kl_penalty, reduction="token-mean")
    mean_kl = partial(kl_divergence, reduction="token-mean")
    kl = partial(kl_divergence, reduction="none")
    return [
        Size("forward", sums, eager.k3_seq_sum, "fp32", (4, 64), "logprobs"),
        Size("one-read", mean, eager.k3_token_mean, "fp32", (512, 8192), "logprobs", 1),
        Size("one-read", mean, eager.k3_token_mean, "bf16", (512, 8192), "logprobs", 1),
        Size("kl-one-read", mean_kl, eager.mean_kl, "bf16", words, "pairs", 1),
        Size("kl", kl, eager.kl, "fp32", words, "pairs"),
        Size("logprob-two-pass", token_logprobs, eager.token_logprobs, "bf16", words, "tokens", 2),
    ]


def time_on(device: str, backends: Sequence[Any]) -> list[TimeRow]:
    """The rows of a device's backends, but for the reference where there is another."""
    fast = [backend for backend in backends if backend != "reference"] or list(backends)
    return [row for size in sizes(device) for row in _rows(size, device, fast)]


def _rows(size: Size, device: str, backends: Sequence[Any]) -> list[TimeRow]:
    input_bytes = sum(size.sizes)
    copies = rotation(input_bytes) if device == "cpu" else 1
    inputs = [size.inputs(device) for _ in range(copies)]
    memory = torch.empty_like(inputs[0].storage)
    candidates: dict[str, Callable[[Inputs], Any]] = {
        backend: partial(size.run, partial(size.ours, backend=backend)) for backend in backends
    }
    candidates[_EAGER] = partial(size.run, size.eager)
    candidates[_COPY] = lambda given: memory.copy_(given.storage)
    seconds = (_on_cpu if device == "cpu" else _on_gpu)(candidates, inputs)
    copied = 2 * input_bytes / seconds[_COPY]
    return [
        TimeRow(
            device,
            size.case,
            backend,
            seconds[backend] * 1e3,
            size.least_bytes / seconds[backend] / 1e9,
            size.least_bytes / seconds[backend] / copied,
            seconds[_EAGER] * 1e3,
            size.least_bytes,
        )
        for backend in backends
    ]


def _on_cpu(
    candidates: dict[str, Callable[[Inputs], Any]], inputs: Sequence[Inputs]
) -> dict[str, float]:
    def timed(timer: timeit.Timer, calls: int) -> Callable[[], float]:
        seconds = timer.timeit(calls) / calls
        return lambda: seconds

    timers = timers_of(candidates, inputs)
    measures = {name: partial(timed, each, calls_per_timing(each)) for name, each in timers.items()}
    return _medians(alternate(measures, ROUNDS))


def _on_gpu(
    candidates: dict[str, Callable[[Inputs], Any]], inputs: Sequence[Inputs]
) -> dict[str, float]:
    """By the device's clock, with cold caches."""
    place = inputs[0].storage.device
    with torch.cuda.device(place):
        gpu = Cuda(place)
        calls = {name: partial(call, inputs[0]) for name, call in candidates.items()}
        for call in calls.values():
            call()
        queued = {
            name: partial(gpu.queue, call, cold=True, head_start=1e-4)
            for name, call in calls.items()
        }
        return _medians(alternate(queued, ROUNDS, gpu.synchronize))


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in seconds.items()}


TIMES = ("device", "case", "backend", "ms", "GB/s", "of a copy", "eager ms", "eager / klfast")
"""Headings of what ``cells_of`` makes of a row."""


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The text of a row's cells."""
    numbers = (row["ms"], row["gb_per_s"], row["copy_share"], row["eager_ms"])
    formats = ("{:.3g}", "{:.3g}", "{:.0%}", "{:.3g}", "{:.2g}")
    cells = zip(formats, (*numbers, row["eager_ms"] / row["ms"]), strict=True)
    return row["device"], row["case"], row["backend"], *(f.format(n) for f, n in cells)
