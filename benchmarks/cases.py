"""What is timed: an op, a dtype and a shape; and the inputs it is timed on.

What there is to time of log-probs is in ``tokens``, of logits in ``logits``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from klfast.names import BackendName

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

KEPT = 0.8
"""Share of the tokens that a random mask keeps."""

SPREAD = 0.1
"""Standard deviation of the log-ratio, in nats."""

EAGER = "eager"
SELECTIVE = "selective"
"""Eager too, in less memory."""

_ALIGNMENT = 64

Forward = Callable[..., Any]
"""Takes what ``Inputs.arguments`` holds."""

Layout = Sequence[tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor."""

Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One set of inputs.

    Attributes:
        grad_out: what the backward starts from; None (one) for a scalar.
        storage: the memory that holds the other tensors and nothing else, int64; None if they are
            not laid out together.
    """

    grad_out: Tensor | None = None
    storage: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What a forward takes; the gradient is of the first."""
        raise NotImplementedError

    def in_float64(self, numbers: int) -> Iterator[Inputs]:
        """The same in float64, in parts of so many numbers of the first tensor."""
        raise NotImplementedError


@dataclass(frozen=True)
class Op(ABC):
    """One thing to compute.

    Attributes:
        name: as on the command line.
        backward: whether the gradient of the first tensor is computed too.
        reads: how often the inputs must be read at the least.
    """

    name: str
    backward: bool = False
    reads: int = 1

    working_bytes: ClassVar[int]
    """For each number of the first tensor: temporaries of the hungriest candidate, and of the
    check."""
    gpu_working_bytes: ClassVar[int]
    """The same on a GPU, of what must not fail there."""

    @property
    def can_pack(self) -> bool:
        """Whether it is timed on packed sequences too. Packed tokens over logits are rows."""
        return False

    @abstractmethod
    def layout(self, case: Case) -> Layout:
        """The tensors that are read."""

    @abstractmethod
    def inputs(self, case: Case, tensors: Sequence[Tensor], storage: Tensor) -> Inputs:
        """The inputs made of tensors of that layout, which lie in ``storage``."""

    @abstractmethod
    def fill(self, inputs: Any) -> None:
        """Puts random values into inputs."""

    @abstractmethod
    def klfast(self, backend: BackendName = "auto", normalizer: Any = None) -> Forward:
        """Klfast's forward; ``normalizer`` is that of a mean."""

    @abstractmethod
    def eager(self, packed: bool = False) -> dict[str, Forward]:
        """Name -> what is written without klfast; the first is what is compiled, too."""

    def beside(self, inputs: Any) -> dict[str, Callable[[Any], Any]]:
        """Name -> what is timed with the candidates, and not checked, as it computes something
        else; it is given ``inputs`` or others like them.
        """
        return {}

    @abstractmethod
    def named(self, outputs: Any) -> dict[str, Tensor]:
        """What a forward returned, by name."""

    @abstractmethod
    def normalizer(self, inputs: Any) -> Any:
        """What a mean divides by: the same in any part of the inputs; None without a mean."""

    @abstractmethod
    def sizes(self, inputs: Any) -> tuple[float, float]:
        """How large the terms are that a value, and a gradient, is made of."""


@dataclass(frozen=True)
class Case:
    """An op on a dtype (a key of ``DTYPES``) and a shape, rows x columns.

    ``packed``: on as many tokens and sequences, packed, with as many columns on average.
    """

    op: Op
    dtype: str
    shape: tuple[int, int]
    packed: bool = False

    @property
    def name(self) -> str:
        layout = " packed" if self.packed else ""
        return f"{self.op.name} {self.dtype} {self.shape[0]}x{self.shape[1]}{layout}"

    @property
    def numbers(self) -> int:
        """Of each large tensor."""
        return math.prod(self.shape)

    @property
    def input_bytes(self) -> int:
        return sum(_sizes(self))

    @property
    def gradient_bytes(self) -> int:
        return self.numbers * DTYPES[self.dtype].itemsize if self.op.backward else 0

    @property
    def least_bytes(self) -> int:
        """What must move whoever computes it: the reads, and the gradient if there is one."""
        return self.op.reads * self.input_bytes + self.gradient_bytes


@dataclass(frozen=True)
class Suite:
    """What is timed together.

    Attributes:
        name: as on the command line.
        ops: name -> op.
        rows_by_columns: what a shape means.
        shapes, quick_shapes: on a CPU; the second with ``--quick``, everywhere.
        gpu_ops, gpu_shapes, gpu_packed_shapes: on a GPU.
        gpu_rounds, gpu_budget: rounds of each case there, and seconds for all of them.
        with_memory: whether the peak of a CPU's memory is measured too.
        facts: of the inputs, for the conditions.
        text: what is computed, and of what inputs, for the table's reader.
    """

    name: str
    ops: Mapping[str, Op]
    rows_by_columns: str
    shapes: Shapes
    quick_shapes: Shapes
    gpu_ops: tuple[str, ...]
    gpu_shapes: Shapes
    gpu_packed_shapes: Shapes
    gpu_rounds: int
    gpu_budget: float
    with_memory: bool
    facts: Mapping[str, Any]
    text: str


def make_inputs(case: Case, copies: int, device: torch.device | str = "cpu") -> list[Any]:
    """Sets of random inputs: the same values, each in memory of its own."""
    storage = torch.zeros(sum(map(_padded, _sizes(case))), dtype=torch.uint8, device=device)
    first = _inputs_in(storage, case)
    case.op.fill(first)
    return [first, *(_inputs_in(storage.clone(), case) for _ in range(copies - 1))]


def largest(tensor: Tensor) -> float:
    """The largest size of an entry; 0 without one. Makes nothing of the tensor's size."""
    return max(abs(float(end)) for end in tensor.detach().aminmax()) if tensor.numel() else 0.0


def in_float64(leaf: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor, which ask for a gradient if it does."""
    return leaf[rows].detach().double().requires_grad_(leaf.requires_grad)


def _sizes(case: Case) -> list[int]:
    """Bytes of each tensor."""
    return [math.prod(shape) * dtype.itemsize for dtype, shape in case.op.layout(case)]


def _padded(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def _inputs_in(storage: Tensor, case: Case) -> Inputs:
    """The inputs as views of one block of bytes, so that a plain read can read the same bytes."""
    sizes = _sizes(case)
    blocks = torch.split(storage.view(torch.uint8), [_padded(size) for size in sizes])
    tensors = [
        block[:size].view(dtype).view(shape)
        for block, size, (dtype, shape) in zip(blocks, sizes, case.op.layout(case), strict=True)
    ]
    return case.op.inputs(case, tensors, storage.view(torch.int64))
