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
SCALAR_REDUCTIONS = REDUCTIONS[3:]
NORMALIZED_REDUCTIONS = REDUCTIONS[4:]
"""Scalar means, whose denominator ``normalizer`` replaces."""


class KLTensors(NamedTuple):
    """The tensors of a call, in the order that the kernels take them.

    Only ``logprobs`` and ``ref_logprobs`` may carry a graph; validation has detached the rest.
    ``coef`` and ``normalizer`` are here if they are tensors, in the call's options if they are
    numbers.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    old_logprobs: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    coef: Tensor | None = None
    normalizer: Tensor | None = None


class KLCall(NamedTuple):
    """Arguments of ``kl_penalty`` (and, with ``scores``, of ``kl_rewards``) after every check."""

    tensors: KLTensors
    estimator: Estimator
    reduction: str
    coef: float
    normalizer: float | None
    return_stats: bool
    scores: Tensor | None = None
