"""The cases, each an op, a dtype and a shape, and the inputs that a case is timed on.

The ops over log-probs are in ``tokens``, those over logits in ``logits`` and ``topk``, those from
hidden states in ``linear``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from klfast.types.names import BackendName

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

KEPT = 0.8  # share of the tokens that a random mask keeps
SPREAD = 0.1  # standard deviation of the log-ratio, in nats

EAGER = "eager"
SELECTIVE = "selective"  # eager too, in less memory

_ALIGNMENT = 64

Forward = Callable[..., Any]  # takes what ``Inputs.arguments`` holds
Layout = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of each tensor

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


@dataclass(frozen=True)
class Inputs:
    """One set of inputs.

    Attributes:
        arguments: the arguments of a forward.
        grad_out: the backward's incoming gradient, a number per row; None (one) for a scalar.
        storage: the memory that holds the inputs and nothing else, int64.
        packed: whether the rows of the arguments are no sequences.
        shared: places of the arguments that all rows share, such as a weight.
    """

    arguments: tuple[Tensor, ...]
    grad_out: Tensor | None = None
    storage: Tensor | None = None
    packed: bool = False
    shared: frozenset[int] = frozenset()

    @property
    def block(self) -> Tensor:
        """The storage of inputs that have one."""
        if self.storage is None:
            raise ValueError("inputs must lie in one block of memory to be read as one")
        return self.storage

    def in_float64(self, size: int) -> Iterator[Inputs]:
        """The same in float64, in parts of so many rows; packed, in one."""
        count = len(self.arguments[0])
        shared = {place: _wide(self.arguments[place], slice(None)) for place in self.shared}
        step = count if self.packed else size
        for begin in range(0, count, step):
            rows = slice(None) if self.packed else slice(begin, begin + step)
            yield replace(
                self,
                arguments=tuple(
                    shared[place] if place in shared else _wide(tensor, rows)
                    for place, tensor in enumerate(self.arguments)
                ),
                grad_out=None if self.grad_out is None else _wide(self.grad_out, rows),
                storage=None,
            )


def _wide(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows in float64, which ask for a gradient if the tensor does; integers stay."""
    if not tensor.is_floating_point():
        return tensor[rows]
    return tensor[rows].detach().double().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class Op(ABC):
    """One thing to compute.

    Attributes:
        name: as on the command line.
        backward: whether the gradients are computed too.
        reads: how often the inputs must be read at the least.
    """

    name: str
    backward: bool = False
    reads: int = 1

    working_bytes: ClassVar[int]
    """For each of ``numbers``: temporaries of the hungriest candidate, and of the check."""
    gpu_working_bytes: ClassVar[int]
    """The same on a GPU, of what must not fail there."""
    can_pack: ClassVar[bool] = False
    """Packed sequences are timed too. Packed tokens over logits are rows."""
    outputs: ClassVar[tuple[str, ...]] = ("divergence",)
    """The names of a forward's outputs."""

    @property
    def shared(self) -> frozenset[int]:
        """As in ``Inputs``."""
        return frozenset()

    @property
    def gradients(self) -> dict[str, int]:
        """Name -> place of the argument that it is of."""
        return {"gradient": 0}

    def numbers(self, shape: Shape) -> int:
        """The number of elements of the largest tensor that eager makes."""
        return math.prod(shape)

    def rows_at_once(self, inputs: Inputs, numbers: int) -> int:
        """The rows that make so many numbers, for the check."""
        return max(1, numbers // max(1, inputs.arguments[0].shape[-1]))

    @abstractmethod
    def layout(self, case: Case) -> Layout:
        """The tensors that are read."""

    @abstractmethod
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Puts random values into them."""

    @property
    @abstractmethod
    def is_scalar(self) -> bool:
        """The result is one number, and not one a row."""

    @abstractmethod
    def klfast(self, backend: BackendName = "auto", normalizer: Any = None) -> Forward:
        """Klfast's forward; ``normalizer`` divides a mean."""

    @abstractmethod
    def eager(self, packed: bool = False) -> dict[str, Forward]:
        """Name -> a forward without klfast. The first is also compiled."""

    def beside(self, inputs: Inputs) -> dict[str, Callable[[Any], Any]]:
        """Name -> a call that is timed with the candidates, on ``inputs`` or others like them.

        Its result is not checked, because it computes something else.
        """
        return {}

    def floors(self) -> dict[str, Callable[[Inputs], Any]] | None:
        """Name -> ways to do the work that every candidate needs. The fastest is timed.

        None means a read of the inputs, and a fill of the gradient.
        """
        return None

    def named(self, outputs: Any) -> dict[str, Tensor]:
        """The outputs of a forward, by name."""
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        return dict(zip(self.outputs, several, strict=False))

    @abstractmethod
    def normalizer(self, inputs: Inputs) -> Any:
        """The denominator of a mean, the same in any part of the inputs; None without a mean."""

    def rounding(self, inputs: Inputs) -> tuple[float, float]:
        """How far values, and gradients, may be off because candidates round to the inputs' dtype,
        as shares of the largest.
        """
        return 0.0, torch.finfo(inputs.arguments[0].dtype).eps

    @abstractmethod
    def sizes(self, inputs: Inputs) -> tuple[float, float]:
        """How large the terms are that a value, and a gradient, is made of."""


@dataclass(frozen=True)
class Case:
    """An op on a dtype (a key of ``DTYPES``) and a shape, whose sizes the suite names.

    ``packed``: on as many tokens and sequences, packed, with as many columns on average.
    """

    op: Op
    dtype: str
    shape: Shape
    packed: bool = False

    @property
    def name(self) -> str:
        layout = " packed" if self.packed else ""
        return f"{self.op.name} {self.dtype} {shape_text(self.shape)}{layout}"

    @property
    def numbers(self) -> int:
        return self.op.numbers(self.shape)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [math.prod(shape) * dtype.itemsize for dtype, shape in self.op.layout(self)]

    @property
    def input_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def gradient_bytes(self) -> int:
        sizes = self.sizes
        return sum(sizes[at] for at in self.op.gradients.values()) if self.op.backward else 0

    @property
    def least_bytes(self) -> int:
        """The least bytes that any implementation moves: its reads, and the gradients if any."""
        return self.op.reads * self.input_bytes + self.gradient_bytes


@dataclass(frozen=True)
class Suite:
    """The cases that are timed together.

    Attributes:
        name: as on the command line.
        ops: name -> op.
        sizes: the names of a shape's sizes.
        shapes, quick_shapes: the shapes on a CPU, and the shapes with ``--quick`` on all devices.
        gpu_ops, gpu_shapes, gpu_packed_shapes: on a GPU. Without ``gpu_ops``, all are timed there.
        gpu_rounds, gpu_budget: rounds of each case there, and seconds for all of them.
        with_memory: whether the peak of a CPU's memory is measured too.
        facts: facts about the inputs, for the conditions.
        text: tells the table's reader the computation and its inputs.
    """

    name: str
    ops: Mapping[str, Op]
    sizes: tuple[str, ...]
    shapes: Shapes
    quick_shapes: Shapes
    gpu_shapes: Shapes
    gpu_budget: float
    facts: Mapping[str, Any]
    text: str
    gpu_ops: tuple[str, ...] = ()
    gpu_packed_shapes: Shapes = ()
    gpu_rounds: int = 20
    with_memory: bool = True

    @property
    def rows_by_columns(self) -> str:
        """A shape, in words."""
        return shape_text(self.sizes, " x ")


OpType = TypeVar("OpType", bound=Op)


def by_name(*ops: OpType) -> dict[str, OpType]:
    return {op.name: op for op in ops}


def shape_text(shape: Sequence[object], times: str = "x") -> str:
    """A shape as on the command line."""
    return times.join(map(str, shape))


def make_inputs(case: Case, copies: int, device: torch.device | str = "cpu") -> list[Inputs]:
    """Sets of random inputs: the same values, each in memory of its own."""
    size = sum(map(_padded, case.sizes))
    storage = torch.zeros(size, dtype=torch.uint8, device=device)
    case.op.fill(_tensors_in(storage, case))
    rest = [storage.clone() for _ in range(copies - 1)]
    return [_inputs_in(each, case) for each in (storage, *rest)]


def boundaries(sequences: int, tokens: int) -> Tensor:
    """[sequences + 1], int32: lengths around ``tokens``, in a random order that never changes."""
    steps = torch.arange(sequences, device="cpu") * 2 - (sequences - 1)  # the steps sum to 0
    lengths = tokens + torch.round(steps * (UNEVEN * tokens / max(1, sequences - 1))).to(
        torch.int32
    )
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(0), device="cpu")
    return torch.cat([lengths.new_zeros(1), lengths[order].cumsum(0, dtype=torch.int32)])


UNEVEN = 0.75
"""Packed sequences have evenly spread lengths, from 1 - UNEVEN to 1 + UNEVEN times their mean."""


def largest(tensor: Tensor) -> float:
    """The largest size of an entry; 0 without one. Makes nothing of the tensor's size."""
    return max(abs(float(end)) for end in tensor.detach().aminmax()) if tensor.numel() else 0.0


def _padded(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def _tensors_in(storage: Tensor, case: Case) -> list[Tensor]:
    """Views of one block of bytes, so that a plain read can read the same bytes."""
    blocks = torch.split(storage, [_padded(size) for size in case.sizes])
    return [
        block[:size].view(dtype).view(shape)
        for block, size, (dtype, shape) in zip(
            blocks, case.sizes, case.op.layout(case), strict=True
        )
    ]


def _inputs_in(storage: Tensor, case: Case) -> Inputs:
    tensors, device = _tensors_in(storage, case), storage.device
    for place in case.op.gradients.values():
        tensors[place].requires_grad_(case.op.backward)
    if case.packed:
        tensors.append(boundaries(*case.shape).to(device))
    given = case.op.backward and not case.op.is_scalar
    grad_out = torch.rand(case.shape[0], device=device) if given else None
    words = storage.view(torch.int64)
    return Inputs(tuple(tensors), grad_out, words, case.packed, case.op.shared)
