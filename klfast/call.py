"""The validated arguments of one call, as they travel from the public functions to a backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from klfast.estimator import Estimator

REDUCTIONS = (
    "none",
    "seq-sum",
    "seq-mean",
    "token-sum",
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
)
NORMALIZED_REDUCTIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
"""Scalar means, whose denominator ``normalizer`` replaces."""


class KLCall(NamedTuple):
    """Arguments of ``kl_penalty`` (and, with ``scores``, of ``kl_rewards``) after every check.

    Only ``logprobs`` and ``ref_logprobs`` may carry a graph; validation has detached the rest.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    old_logprobs: Tensor | None
    estimator: Estimator
    reduction: str = "none"
    coef: float | Tensor = 1.0
    normalizer: float | Tensor | None = None
    return_stats: bool = False
    scores: Tensor | None = None
