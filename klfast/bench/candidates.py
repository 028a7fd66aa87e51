"""Who is timed: klfast, the frameworks' eager formula, and ``torch.compile`` of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import klfast
from klfast.bench.cases import Case, Inputs, Op
from klfast.stats import KLStats

Forward = Callable[..., Any]
"""(logprobs, ref_logprobs, mask[, cu_seqlens]) -> the penalty, or (penalty, KLStats)."""

Candidate = Callable[[Inputs], Any]
"""What is called in a timing. Returns the penalty, (penalty, KLStats) or (penalty, gradient)."""

KLFAST = "klfast"
EAGER = "eager"
COMPILE = "torch.compile"
AUTOTUNED = "torch.compile max-autotune"

MODES = {COMPILE: None, AUTOTUNED: "max-autotune-no-cudagraphs"}
"""Name -> ``mode`` of ``torch.compile``. CUDA graphs are timed apart, for every candidate."""


def klfast_forward(op: Op, backend: str = "auto") -> Forward:
    def forward(
        logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None
    ) -> Any:
        return klfast.kl_penalty(  # type: ignore[call-overload]  # return_stats is no literal
            logprobs,
            ref_logprobs,
            mask,
            reduction=op.reduction,
            cu_seqlens=cu_seqlens,
            return_stats=op.stats,
            backend=backend,
        )

    return forward


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
        max_log_ratio=(x.abs() * mask).amax(-1),
        clipped=torch.zeros_like(kl),
        nonfinite=(~x.isfinite() & mask).sum(-1),
    )
    return kl, stats


def eager_forward(op: Op, packed: bool = False) -> Forward:
    if op.stats:
        return eager_stats
    seq_sum = eager_packed_seq_sum if packed else eager_seq_sum
    return {"seq-sum": seq_sum, "token-mean": eager_token_mean}[op.reduction]


def compiled_forward(op: Op) -> Forward:
    """Compiled for one shape, and alone in dynamo's cache: the rival at its best."""
    torch.compiler.reset()
    return _compiled(eager_forward(op))


def _compiled(forward: Forward, mode: str | None = None) -> Forward:
    compiled: Forward = torch.compile(forward, fullgraph=True, dynamic=False, mode=mode)
    return compiled


def candidate(op: Op, forward: Forward) -> Candidate:
    """A forward, with the backward behind it if the op has one."""

    def run_forward(inputs: Inputs) -> Any:
        return forward(*inputs.arguments)

    def run_both(inputs: Inputs) -> Any:
        penalty = run_forward(inputs)
        return penalty, torch.autograd.grad(penalty, inputs.logprobs, inputs.grad_out)[0]

    return run_both if op.backward else run_forward


def build_candidates(op: Op, with_compile: bool) -> dict[str, Candidate]:
    """Name -> candidate; klfast first."""
    forwards = {KLFAST: klfast_forward(op), EAGER: eager_forward(op)}
    if with_compile:
        forwards[COMPILE] = compiled_forward(op)
    return {name: candidate(op, forward) for name, forward in forwards.items()}


def build_gpu_candidates(
    case: Case, backends: Sequence[str], modes: Sequence[str]
) -> dict[str, Candidate]:
    """Name -> candidate: klfast's backends by their names, eager, and compiled in each mode.

    Args:
        case: what they compute.
        backends: of klfast.
        modes: keys of ``MODES``.
    """
    torch.compiler.reset()  # alone in dynamo's cache
    eager = eager_forward(case.op, case.packed)
    forwards = {backend: klfast_forward(case.op, backend) for backend in backends}
    forwards[EAGER] = eager
    forwards |= {name: _compiled(eager, MODES[name]) for name in modes}
    return {name: candidate(case.op, forward) for name, forward in forwards.items()}
