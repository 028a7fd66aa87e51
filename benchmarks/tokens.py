"""The k3 penalty of log-probs, timed.

Shapes: B sequences of T tokens; packed, N = B * T tokens of B sequences whose lengths differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import klfast
from benchmarks.candidates import Candidate, candidate
from benchmarks.cases import (
    DTYPES,
    EAGER,
    KEPT,
    SPREAD,
    Case,
    Forward,
    Inputs,
    Layout,
    Op,
    Suite,
    in_float64,
)
from klfast.stats import KLStats

UNEVEN = 0.75
"""Packed sequences have evenly spread lengths, from 1 - UNEVEN to 1 + UNEVEN times their mean."""

PLAIN = "plain k3"
"""klfast without what a case adds to it, timed beside."""


@dataclass(frozen=True)
class TokenInputs(Inputs):
    """Inputs of the penalty; ``grad_out`` is [B] for ``seq-sum``.

    Attributes:
        logprobs, ref_logprobs, mask: [B, T], or packed [N].
        old_logprobs: the same, of an op with weights; else None.
        cu_seqlens: [B+1], int32, of packed inputs; else None.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    mask: Tensor
    old_logprobs: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        others = (self.old_logprobs, self.cu_seqlens)
        given = (tensor for tensor in others if tensor is not None)
        return (self.logprobs, self.ref_logprobs, self.mask, *given)

    def in_float64(self, numbers: int) -> Iterator[TokenInputs]:
        """Parts are rows; packed tokens stay together."""
        if self.cu_seqlens is not None:
            yield self._rows_in_float64(slice(None))
            return
        rows = max(1, numbers // max(1, self.mask.shape[1]))
        for first in range(0, self.mask.shape[0], rows):
            yield self._rows_in_float64(slice(first, first + rows))

    def _rows_in_float64(self, rows: slice) -> TokenInputs:
        return replace(
            self,
            logprobs=in_float64(self.logprobs, rows),
            ref_logprobs=self.ref_logprobs[rows].double(),
            mask=self.mask[rows],
            old_logprobs=None if self.old_logprobs is None else self.old_logprobs[rows].double(),
            grad_out=None if self.grad_out is None else self.grad_out[rows].double(),
            storage=None,
        )


@dataclass(frozen=True)
class TokensOp(Op):
    """One way of asking for the k3 penalty.

    Attributes:
        reduction: of :func:`klfast.kl_penalty`.
        stats: whether the statistics are computed too.
    """

    reduction: klfast.ReductionName = "seq-sum"
    stats: bool = False

    working_bytes = 48
    gpu_working_bytes = 400  # of all: float64 graphs of the check, and of the candidates

    @property
    def can_pack(self) -> bool:
        """Eager's statistics are of rows."""
        return not self.stats

    def layout(self, case: Case) -> Layout:
        """Two log-probs and a boolean mask."""
        shape = (case.numbers,) if case.packed else case.shape
        dtype = DTYPES[case.dtype]
        return [(dtype, shape), (dtype, shape), (torch.bool, shape)]

    def inputs(self, case: Case, tensors: Sequence[Tensor], storage: Tensor) -> TokenInputs:
        logprobs, ref_logprobs, mask = tensors
        return TokenInputs(
            logprobs.requires_grad_(self.backward),
            ref_logprobs,
            mask,
            cu_seqlens=boundaries(*case.shape).to(storage.device) if case.packed else None,
            grad_out=self.grad_out(case.shape[0], storage.device),
            storage=storage,
        )

    def grad_out(self, sequences: int, device: torch.device) -> Tensor | None:
        """[sequences] for per-sequence sums that have a backward."""
        needed = self.backward and self.reduction == "seq-sum"
        return torch.rand(sequences, device=device) if needed else None

    def fill(self, inputs: TokenInputs) -> None:
        inputs.logprobs.detach().uniform_(-5, -1)
        inputs.ref_logprobs.normal_(std=SPREAD).add_(inputs.logprobs.detach())
        inputs.mask.bernoulli_(KEPT)

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        def forward(
            logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None
        ) -> Any:
            return klfast.kl_penalty(
                logprobs,
                ref_logprobs,
                mask,
                reduction=self.reduction,
                cu_seqlens=cu_seqlens,
                normalizer=normalizer,
                return_stats=self.stats,
                backend=backend,
            )

        return forward

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        if self.stats:
            return {EAGER: eager_stats}
        seq_sum = eager_packed_seq_sum if packed else eager_seq_sum
        return {EAGER: {"seq-sum": seq_sum, "token-mean": eager_token_mean}[self.reduction]}

    def beside(self, inputs: TokenInputs) -> dict[str, Candidate]:
        """The same without statistics."""
        return {PLAIN: candidate(self, replace(self, stats=False).klfast())} if self.stats else {}

    def named(self, outputs: Any) -> dict[str, Tensor]:
        if self.stats:
            return {"penalty": outputs[0], **outputs[1]._asdict()}
        return {"penalty": outputs}

    def normalizer(self, inputs: TokenInputs) -> Tensor | None:
        return inputs.mask.sum() if self.reduction == "token-mean" else None

    def sizes(self, inputs: TokenInputs) -> tuple[float, float]:
        x = torch.where(inputs.mask, inputs.logprobs.detach() - inputs.ref_logprobs, 0)
        term = 1 + float(x.abs().max())
        if self.reduction == "token-mean":
            return term, 1 / max(1, int(inputs.mask.sum()))
        grad_out = 1.0 if inputs.grad_out is None else float(inputs.grad_out.abs().max())
        packed = inputs.cu_seqlens
        longest = inputs.mask.sum(-1) if packed is None else packed.diff()
        return term * int(longest.max()), grad_out


OPS = {
    op.name: op
    for op in (
        TokensOp("forward"),
        TokensOp("stats", stats=True),
        TokensOp("one-read", backward=True, reduction="token-mean"),
        TokensOp("two-pass", backward=True, reads=2),
    )
}
"""``one-read`` and ``two-pass`` are forward+backward: of a scalar, where the forward can write the
gradient as it reads, and of per-sequence sums, where the backward must read again."""

SUITE = Suite(
    name="tokens",
    ops=OPS,
    rows_by_columns="sequences x tokens",
    shapes=((512, 8192), (4096, 16384), (4, 64)),
    quick_shapes=((16, 256),),
    gpu_ops=("forward", "one-read", "two-pass"),
    gpu_shapes=((256, 8192), (8, 512), (4096, 16384), (64, 2048)),
    gpu_packed_shapes=((256, 8192),),
    gpu_rounds=30,
    gpu_budget=210.0,  # compiling takes most of them
    with_memory=False,
    facts={
        "estimator": "k3",
        "mask_kept": KEPT,
        "log_ratio_std": SPREAD,
        "packed_lengths": [1 - UNEVEN, 1 + UNEVEN],
    },
    text=f"k3, random mask that keeps {KEPT:.0%}, log-ratio of {SPREAD} nats",
)


def copy_inputs(
    op: TokensOp, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, copies: int
) -> list[TokenInputs]:
    """Sets of inputs that are copies of the given tensors."""
    return [
        TokenInputs(
            logprobs.detach().clone().requires_grad_(op.backward),
            ref_logprobs.detach().clone(),
            mask.clone(),
            grad_out=op.grad_out(logprobs.shape[0], logprobs.device),
        )
        for _ in range(copies)
    ]


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


def eager_tokens(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3 as the frameworks write it, upcast to fp32: (exp(-x) - 1 + x) * mask."""
    x = logprobs.float() - ref_logprobs.float()
    return (torch.exp(-x) - 1 + x) * mask


def eager_seq_sum(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return eager_tokens(logprobs, ref_logprobs, mask).sum(-1)


def eager_token_mean(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    return eager_tokens(logprobs, ref_logprobs, mask).sum() / mask.sum()


def eager_packed_seq_sum(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Per-sequence sums of packed tokens by ``index_add``, which torch.compile can fuse."""
    tokens = eager_tokens(logprobs, ref_logprobs, mask)
    position = torch.arange(len(tokens), dtype=cu_seqlens.dtype, device=tokens.device)
    sequence = torch.bucketize(position, cu_seqlens[1:], out_int32=True, right=True)
    return tokens.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence, tokens)


def eager_stats(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, KLStats]:
    """The same statistics; ``k3`` is the penalty, and without limits nothing is ``clipped``."""
    x = logprobs.float() - ref_logprobs.float()
    kl = ((torch.exp(-x) - 1 + x) * mask).sum(-1)
    stats = KLStats(
        kl=kl,
        length=mask.sum(-1),
        k1=(x * mask).sum(-1),
        k2=(x * x / 2 * mask).sum(-1),
        k3=kl,
        max_abs_log_ratio=(x.abs() * mask).amax(-1),
        clipped=torch.zeros_like(kl),
        nonfinite=(~x.isfinite() & mask).sum(-1),
    )
    return kl, stats
