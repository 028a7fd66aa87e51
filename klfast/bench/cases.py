"""What is timed: an op, a dtype and a shape; and the inputs it is timed on.

Shapes: B sequences of T tokens; packed, N = B * T tokens of B sequences whose lengths differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

KEPT = 0.8
"""Share of the tokens that the random mask keeps."""

SPREAD = 0.1
"""Standard deviation of the log-ratio, in nats."""

UNEVEN = 0.75
"""Packed sequences have evenly spread lengths, from 1 - UNEVEN to 1 + UNEVEN times their mean."""

_ALIGNMENT = 64


@dataclass(frozen=True)
class Op:
    """One way of asking for the k3 penalty.

    Attributes:
        name: as on the command line.
        reduction: of :func:`klfast.kl_penalty`.
        backward: whether the gradient of ``logprobs`` is computed too.
        stats: whether the statistics are.
        reads: how often the two log-probs and the mask must be read at the least.
    """

    name: str
    reduction: str
    backward: bool = False
    stats: bool = False
    reads: int = 1


OPS = {
    op.name: op
    for op in (
        Op("forward", "seq-sum"),
        Op("stats", "seq-sum", stats=True),
        Op("one-read", "token-mean", backward=True),
        Op("two-pass", "seq-sum", backward=True, reads=2),
    )
}
"""``one-read`` and ``two-pass`` are forward+backward: of a scalar, where the forward can write the
gradient as it reads, and of per-sequence sums, where the backward must read again."""


@dataclass(frozen=True)
class Case:
    """An op on a dtype (a key of ``DTYPES``) and a shape [B, T].

    ``packed``: on as many tokens and sequences, packed, of T tokens on average.
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
    def tokens(self) -> int:
        return math.prod(self.shape)

    @property
    def input_bytes(self) -> int:
        """Two log-probs and a boolean mask."""
        return self.tokens * (2 * DTYPES[self.dtype].itemsize + 1)

    @property
    def least_bytes(self) -> int:
        """What must move whoever computes it: the reads, and the gradient if there is one."""
        written = self.tokens * DTYPES[self.dtype].itemsize if self.op.backward else 0
        return self.op.reads * self.input_bytes + written


@dataclass(frozen=True)
class Inputs:
    """One set of inputs.

    Attributes:
        logprobs, ref_logprobs, mask: [B, T], or packed [N].
        grad_out: what the backward starts from: [B] for ``seq-sum``, None (one) for a scalar.
        storage: the memory that holds the first three and nothing else, int64; None if they are
            not laid out together.
        cu_seqlens: [B+1], int32, of packed inputs; else None.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    mask: Tensor
    grad_out: Tensor | None = None
    storage: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What a forward takes."""
        packed = () if self.cu_seqlens is None else (self.cu_seqlens,)
        return (self.logprobs, self.ref_logprobs, self.mask, *packed)


def make_inputs(case: Case, copies: int, device: torch.device | str = "cpu") -> list[Inputs]:
    """Sets of random inputs: the same values, each in memory of its own."""
    storage = torch.zeros(sum(_padded(_sizes(case))), dtype=torch.uint8, device=device)
    first = _inputs_in(storage, case)
    first.logprobs.detach().uniform_(-4, 0)
    first.ref_logprobs.normal_(std=SPREAD).add_(first.logprobs.detach())
    first.mask.bernoulli_(KEPT)
    return [first, *(_inputs_in(storage.clone(), case) for _ in range(copies - 1))]


def copy_inputs(
    op: Op, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, copies: int
) -> list[Inputs]:
    """Sets of inputs that are copies of the given tensors."""
    return [
        Inputs(
            logprobs.detach().clone().requires_grad_(op.backward),
            ref_logprobs.detach().clone(),
            mask.clone(),
            _grad_out(op, logprobs.shape[0], logprobs.device),
        )
        for _ in range(copies)
    ]


def _sizes(case: Case) -> list[int]:
    """Bytes of the two log-probs and of the mask."""
    itemsize = DTYPES[case.dtype].itemsize
    return [case.tokens * size for size in (itemsize, itemsize, torch.bool.itemsize)]


def _padded(sizes: list[int]) -> list[int]:
    return [math.ceil(size / _ALIGNMENT) * _ALIGNMENT for size in sizes]


def _inputs_in(storage: Tensor, case: Case) -> Inputs:
    """The inputs as views of one block of bytes, so that a plain read can read the same bytes."""
    sizes = _sizes(case)
    shape = (case.tokens,) if case.packed else case.shape
    blocks = torch.split(storage.view(torch.uint8), _padded(sizes))
    parts = [block[:size] for block, size in zip(blocks, sizes, strict=True)]
    logprobs, ref_logprobs = (part.view(DTYPES[case.dtype]).view(shape) for part in parts[:2])
    return Inputs(
        logprobs.requires_grad_(case.op.backward),
        ref_logprobs,
        parts[2].view(torch.bool).view(shape),
        _grad_out(case.op, case.shape[0], storage.device),
        storage.view(torch.int64),
        boundaries(*case.shape).to(storage.device) if case.packed else None,
    )


def _grad_out(op: Op, sequences: int, device: torch.device) -> Tensor | None:
    needed = op.backward and op.reduction == "seq-sum"
    return torch.rand(sequences, device=device) if needed else None


def boundaries(sequences: int, tokens: int) -> Tensor:
    """[sequences + 1], int32: lengths around ``tokens``, in a random order that never changes."""
    steps = torch.arange(sequences, device="cpu") * 2 - (sequences - 1)  # what they add cancels
    lengths = tokens + torch.round(steps * (UNEVEN * tokens / max(1, sequences - 1))).to(
        torch.int32
    )
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(0), device="cpu")
    cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int32, device="cpu")
    cu_seqlens[1:] = lengths[order].cumsum(0)
    return cu_seqlens
