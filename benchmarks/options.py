"""The options of the k3 penalty, timed beside plain k3 in the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import klfast
from benchmarks.candidates import Candidate, candidate
from benchmarks.cases import DTYPES, EAGER, KEPT, SPREAD, Case, Forward, Layout, Suite
from benchmarks.tokens import PLAIN, TokenInputs, TokensOp
from klfast.estimator import Estimator

LOG_RATIO_CLIP = 20.0
KL_CLIP = 10.0
"""Limits that frameworks set, and that random log-ratios of ``SPREAD`` nats do not reach."""

TOKEN_MEAN: klfast.ReductionName = "token-mean"


@dataclass(frozen=True)
class OptionsOp(TokensOp):
    """k3 with an option.

    Attributes:
        estimator: of :func:`klfast.kl_penalty`, a k3.
        weighted: whether ``old_logprobs`` are given.
    """

    estimator: Estimator = field(default_factory=Estimator)
    weighted: bool = False

    @property
    def can_pack(self) -> bool:
        return False

    def layout(self, case: Case) -> Layout:
        """With weights a third log-prob."""
        return [*super().layout(case), *[(DTYPES[case.dtype], case.shape)] * self.weighted]

    def inputs(self, case: Case, tensors: Sequence[Tensor], storage: Tensor) -> TokenInputs:
        made = super().inputs(case, tensors[:3], storage)
        return replace(made, old_logprobs=tensors[3] if self.weighted else None)

    def fill(self, inputs: TokenInputs) -> None:
        super().fill(inputs)
        if inputs.old_logprobs is not None:
            inputs.old_logprobs.normal_(std=SPREAD).add_(inputs.logprobs.detach())

    def klfast(self, backend: klfast.BackendName = "auto", normalizer: Any = None) -> Forward:
        def forward(
            logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, old_logprobs: Tensor | None = None
        ) -> Tensor:
            return klfast.kl_penalty(
                logprobs,
                ref_logprobs,
                mask,
                estimator=self.estimator,
                old_logprobs=old_logprobs,
                reduction=self.reduction,
                normalizer=normalizer,
                backend=backend,
            )

        return forward

    def eager(self, packed: bool = False) -> dict[str, Forward]:
        def forward(
            logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, old_logprobs: Tensor | None = None
        ) -> Tensor:
            tokens = eager_value(logprobs.float() - ref_logprobs.float(), self.estimator)
            if old_logprobs is not None:
                tokens = tokens * torch.exp(logprobs.float() - old_logprobs.float())
            tokens = tokens * mask
            return tokens.sum(-1) if self.reduction == "seq-sum" else tokens.sum()

        return {EAGER: forward}

    def beside(self, inputs: TokenInputs) -> dict[str, Candidate]:
        """Plain k3; beside plain k3 to ``token-sum`` its ``token-mean``."""
        is_plain = self.estimator == Estimator() and not self.weighted
        reduction = TOKEN_MEAN if is_plain else self.reduction
        plain = TokensOp(self.name, backward=self.backward, reduction=reduction).klfast()

        def forward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *_: Tensor) -> Any:
            return plain(logprobs, ref_logprobs, mask)

        return {TOKEN_MEAN if is_plain else PLAIN: candidate(self, forward)}

    def sizes(self, inputs: TokenInputs) -> tuple[float, float]:
        value, gradient = super().sizes(inputs)
        if inputs.old_logprobs is None:
            return value, gradient
        difference = inputs.logprobs.detach().float() - inputs.old_logprobs.float()
        weight = float(difference.max().exp())
        return value * weight, gradient * weight


def eager_value(x: Tensor, estimator: Estimator) -> Tensor:
    """k3 of log-ratios as the frameworks write it, with these limits and this gradient rule."""
    near = x if estimator.log_ratio_clip is None else x.clamp(*estimator.log_ratio_bounds)
    value = torch.exp(-near) - 1 + near
    if estimator.kl_clip is not None:
        value = value.clamp(-estimator.kl_clip, estimator.kl_clip)
    if estimator.gradient == "k2":
        k2 = x * x / 2
        value = value.detach() + k2 - k2.detach()
    return value


LIMITS = Estimator("k3", log_ratio_clip=LOG_RATIO_CLIP, kl_clip=KL_CLIP)
K2_GRADIENT = Estimator("k3", gradient="k2")

OPS = {
    op.name: op
    for op in (
        OptionsOp("limits", estimator=LIMITS),
        OptionsOp("weights", weighted=True),
        OptionsOp("limits-one-read", backward=True, reduction="token-sum", estimator=LIMITS),
        OptionsOp("weights-one-read", backward=True, reduction="token-sum", weighted=True),
        OptionsOp("k2-one-read", backward=True, reduction="token-sum", estimator=K2_GRADIENT),
        OptionsOp("sum-one-read", backward=True, reduction="token-sum"),
    )
}
"""Forward to per-sequence sums, and forward+backward of the sum over tokens."""

SUITE = Suite(
    name="options",
    ops=OPS,
    rows_by_columns="sequences x tokens",
    shapes=((512, 8192),),
    quick_shapes=((16, 256),),
    gpu_ops=tuple(OPS),
    gpu_shapes=((256, 8192),),
    gpu_packed_shapes=(),
    gpu_rounds=30,
    gpu_budget=210.0,
    with_memory=False,
    facts={
        "estimator": "k3",
        "mask_kept": KEPT,
        "log_ratio_std": SPREAD,
        "log_ratio_clip": LOG_RATIO_CLIP,
        "kl_clip": KL_CLIP,
    },
    text=f"k3, random mask that keeps {KEPT:.0%}, log-ratios and log-weights of {SPREAD} nats, "
    f"limits of {LOG_RATIO_CLIP:g} on the log-ratio and {KL_CLIP:g} on the value",
)
