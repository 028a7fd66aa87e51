"""The k3 penalty of log-probs, plain and with its options, timed.

Shapes: B sequences of T tokens; packed, N = B * T tokens of B sequences whose lengths differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import klfast
from benchmarks import cases
from benchmarks.candidates import candidate
from benchmarks.cases import Case, Forward, Inputs, Layout, Op, Suite, by_name
from klfast.args.estimator import Estimator
from klfast.stats.kl import KLStats

PLAIN = "plain k3"  # klfast without what a case adds to it, timed beside
NEAR = "no token beyond 1 nat"  # klfast with smaller log-ratios than a case has, timed beside

LOG_RATIO_CLIP = 20.0
KL_CLIP = 10.0
"""Limits that frameworks set, and that random log-ratios of ``SPREAD`` nats do not reach."""

TOKEN_MEAN: klfast.ReductionName = "token-mean"
K3 = Estimator("k3")
LIMITS = Estimator("k3", log_ratio_clip=LOG_RATIO_CLIP, kl_clip=KL_CLIP)
K2_GRADIENT = Estimator("k3", gradient="k2")


@dataclass(frozen=True)
class TokensOp(Op):
    """One way of asking for the k3 penalty of ``logprobs``, ``ref_logprobs`` and a ``mask``, [B, T]
    each or packed [N], and of ``old_logprobs`` or ``cu_seqlens`` [B+1] behind them.

    Attributes:
        reduction: of :func:`klfast.kl_penalty`.
        stats: whether the statistics are computed too.
        estimator: a k3, with options.
        weighted: whether ``old_logprobs`` are given.
        far: the share of tokens with log-ratios of 1 to 2 nats.
        other: the op that is timed beside, by its name.
    """

    reduction: klfast.ReductionName = "seq-sum"
    stats: bool = False
    estimator: Estimator = K3
    weighted: bool = False
    far: float = 0.0
    other: str = ""

    working_bytes = 48
    gpu_working_bytes = 400  # of all: float64 graphs of the check, and of the candidates

    @property
    def can_pack(self) -> bool:  # type: ignore[override]  # eager's statistics are of rows
        return not self.stats and not self.other

    @property
    def is_scalar(self) -> bool:
        return self.reduction != "seq-sum"

    def layout(self, case: Case) -> Layout:
        """Two log-probs and a boolean mask; with weights a third log-prob."""
        shape = (case.numbers,) if case.packed else case.shape
        logprobs = (cases.DTYPES[case.dtype], shape)
        return [logprobs, logprobs, (torch.bool, shape), *[logprobs] * self.weighted]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        logprobs, ref_logprobs, mask, *old = tensors
        logprobs.uniform_(-5, -1)
        for other in (ref_logprobs, *old):
            other.normal_(std=cases.SPREAD)
            if self.far:
                other[torch.rand(other.shape, device=other.device) < self.far] -= 1.5
            other.add_(logprobs)
        mask.bernoulli_(cases.KEPT)

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        name = "old_logprobs" if self.weighted else "cu_seqlens"

        def forward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *last: Tensor) -> Any:
            return klfast.kl_penalty(
                logprobs,
                ref_logprobs,
                mask,
                estimator=self.estimator,
                reduction=self.reduction,
                normalizer=normalizer,
                return_stats=self.stats,
                backend=backend,
                **dict(zip((name,), last, strict=False)),
            )

        return forward

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        if self.stats:
            return {cases.EAGER: eager_stats}
        reduce = eager_packed_sum if packed and not self.is_scalar else SUMS[self.reduction]

        def forward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *last: Tensor) -> Tensor:
            tokens = eager_tokens(logprobs.float() - ref_logprobs.float(), self.estimator)
            if self.weighted:
                tokens = tokens * torch.exp(logprobs.float() - last[0].float())
            return reduce(tokens * mask, mask, *last)

        return {cases.EAGER: forward}

    def beside(self, inputs: Inputs) -> dict[str, Callable[[Any], Any]]:
        if not self.other:
            return {}
        mean = self.other == TOKEN_MEAN
        plain = replace(self, stats=False, estimator=K3, weighted=False).klfast()
        if mean:
            plain = replace(self, reduction=TOKEN_MEAN).klfast()
        near: Tensor | None = None
        if self.far:
            logprobs, ref_logprobs, _ = inputs.arguments
            near = logprobs + (ref_logprobs - logprobs).clamp(-cases.SPREAD, cases.SPREAD)

        def forward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *_: Tensor) -> Any:
            return plain(logprobs, ref_logprobs if near is None else near, mask)

        return {self.other: candidate(self, forward)}

    def named(self, outputs: Any) -> dict[str, Tensor]:
        if self.stats:
            return {"penalty": outputs[0], **outputs[1]._asdict()}
        return {"penalty": outputs}

    def normalizer(self, inputs: Inputs) -> Tensor | None:
        return inputs.arguments[2].sum() if self.reduction == TOKEN_MEAN else None

    def sizes(self, inputs: Inputs) -> tuple[float, float]:
        logprobs, ref_logprobs, mask, *last = (each.detach() for each in inputs.arguments)
        term = 1 + float(torch.where(mask, logprobs - ref_logprobs, 0).abs().max())
        weight = 1.0
        if self.weighted:
            weight = float((logprobs.float() - last[0].float()).max().exp())
        if self.reduction == TOKEN_MEAN:
            return term, 1 / max(1, int(mask.sum()))
        grad_out = 1.0 if inputs.grad_out is None else float(inputs.grad_out.abs().max())
        longest = last[0].diff() if inputs.packed else mask.sum(-1)
        return term * int(longest.max()) * weight, grad_out * weight


def eager_tokens(x: Tensor, estimator: Estimator) -> Tensor:
    """k3 of log-ratios as the frameworks write it, with these limits and this gradient rule."""
    near = x if estimator.log_ratio_clip is None else x.clamp(*estimator.log_ratio_bounds)
    value = (-near).exp() - 1 + near
    if estimator.kl_clip is not None:
        value = value.clamp(-estimator.kl_clip, estimator.kl_clip)
    if estimator.gradient == "k2":
        k2 = x * x / 2
        value = value.detach() + k2 - k2.detach()
    return value


def eager_packed_sum(tokens: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Per-sequence sums of packed tokens by ``index_add``, which torch.compile can fuse."""
    position = torch.arange(len(tokens), dtype=cu_seqlens.dtype, device=tokens.device)
    sequence = torch.bucketize(position, cu_seqlens, out_int32=True, right=True) - 1
    return tokens.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence, tokens)


SUMS: dict[str, Callable[..., Tensor]] = {
    "seq-sum": lambda tokens, mask, *_: tokens.sum(-1),
    "token-mean": lambda tokens, mask, *_: tokens.sum() / mask.sum(),
    "token-sum": lambda tokens, mask, *_: tokens.sum(),
}
"""Reduction -> what it makes of masked tokens and their mask."""


def eager_stats(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, KLStats]:
    """The same statistics; ``k3`` is the penalty, and without limits nothing is ``clipped``."""
    x = logprobs.float() - ref_logprobs.float()
    kl = (eager_tokens(x, K3) * mask).sum(-1)
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


OPS = by_name(
    TokensOp("forward"),
    TokensOp("stats", stats=True, other=PLAIN),
    TokensOp("one-read", True, reduction=TOKEN_MEAN),
    TokensOp("two-pass", True, reads=2),
)
"""``one-read`` and ``two-pass`` are forward+backward: of a scalar, where the forward can write the
gradient as it reads, and of per-sequence sums, where the backward must read again."""

OPTIONS = by_name(
    TokensOp("limits", estimator=LIMITS, other=PLAIN),
    TokensOp("weights", weighted=True, other=PLAIN),
    TokensOp("limits-one-read", True, 1, "token-sum", estimator=LIMITS, other=PLAIN),
    TokensOp("weights-one-read", True, 1, "token-sum", weighted=True, other=PLAIN),
    TokensOp("k2-one-read", True, 1, "token-sum", estimator=K2_GRADIENT, other=PLAIN),
    TokensOp("sum-one-read", True, 1, "token-sum", other=TOKEN_MEAN),
    TokensOp("far-2", far=0.02, other=NEAR),
    TokensOp("far-10", far=0.1, other=NEAR),
)
"""The options, timed beside plain k3 in the same rounds: forward to per-sequence sums, and
forward+backward of the sum over tokens. The cases ``far`` have tokens beyond 1 nat."""

_FACTS = {"estimator": "k3", "mask_kept": cases.KEPT, "log_ratio_std": cases.SPREAD}

SUITE = Suite(
    name="tokens",
    ops=OPS,
    sizes=("sequences", "tokens"),
    shapes=((512, 8192), (4096, 16384), (4, 64)),
    quick_shapes=((16, 256),),
    gpu_ops=("forward", "one-read", "two-pass"),
    gpu_shapes=((256, 8192), (8, 512), (4096, 16384), (64, 2048)),
    gpu_packed_shapes=((256, 8192),),
    with_memory=False,
    gpu_rounds=30,
    gpu_budget=210.0,  # compiling takes most of them
    facts={**_FACTS, "packed_lengths": [1 - cases.UNEVEN, 1 + cases.UNEVEN]},
    text=f"k3, random mask that keeps {cases.KEPT:.0%}, log-ratio of {cases.SPREAD} nats",
)

OPTIONS_SUITE = Suite(
    name="options",
    ops=OPTIONS,
    sizes=("sequences", "tokens"),
    shapes=((512, 8192),),
    quick_shapes=((16, 256),),
    gpu_shapes=((256, 8192),),
    with_memory=False,
    gpu_rounds=30,
    gpu_budget=210.0,
    facts={**_FACTS, "log_ratio_clip": LOG_RATIO_CLIP, "kl_clip": KL_CLIP},
    text=f"k3, random mask that keeps {cases.KEPT:.0%}, log-ratios and log-weights of "
    f"{cases.SPREAD} nats, limits of {LOG_RATIO_CLIP:g} on the log-ratio and "
    f"{KL_CLIP:g} on the value",
)
