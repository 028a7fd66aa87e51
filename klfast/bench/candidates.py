"""Who is timed: klfast, the frameworks' eager formula, and ``torch.compile`` of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import klfast
from klfast.bench.cases import Inputs, Op
from klfast.stats import KLStats

Forward = Callable[[Tensor, Tensor, Tensor], Any]
"""(logprobs, ref_logprobs, mask) -> the penalty, or (penalty, KLStats)."""

Candidate = Callable[[Inputs], Any]
"""What is called in a timing. Returns the penalty, (penalty, KLStats) or (penalty, gradient)."""

KLFAST = "klfast"
EAGER = "eager"
COMPILE = "torch.compile"


def klfast_forward(op: Op) -> Forward:
    def forward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Any:
        return klfast.kl_penalty(  # type: ignore[call-overload]  # return_stats is no literal
            logprobs, ref_logprobs, mask, reduction=op.reduction, return_stats=op.stats
        )

    return forward


def eager_tokens(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3 as the frameworks write it, upcast to fp32: (exp(-x) - 1 + x) * mask."""
    x = logprobs.float() - ref_logprobs.float()
    return (torch.exp(-x) - 1 + x) * mask


def eager_seq_sum(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return eager_tokens(logprobs, ref_logprobs, mask).sum(-1)


def eager_token_mean(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return eager_tokens(logprobs, ref_logprobs, mask).sum() / mask.sum()


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


def eager_forward(op: Op) -> Forward:
    if op.stats:
        return eager_stats
    return {"seq-sum": eager_seq_sum, "token-mean": eager_token_mean}[op.reduction]


def compiled_forward(op: Op) -> Forward:
    """Compiled for one shape, and alone in dynamo's cache: the rival at its best."""
    torch.compiler.reset()
    compiled: Forward = torch.compile(eager_forward(op), fullgraph=True, dynamic=False)
    return compiled


def candidate(op: Op, forward: Forward) -> Candidate:
    """A forward, with the backward behind it if the op has one."""

    def run_forward(inputs: Inputs) -> Any:
        return forward(inputs.logprobs, inputs.ref_logprobs, inputs.mask)

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
