"""The call object: the checked arguments of one call, as a backend takes them.

Named tuples here have methods and no properties, and are made without ``_make``, because torch
2.10's dynamo can trace neither.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import (
    Coefficient,
    check_normalizer,
    check_number,
    check_reduction,
    coef_argument,
    without_graph,
)
from klfast.args.estimator import Estimator, as_estimator
from klfast.args.signature import check
from klfast.args.values import (
    are_tracing,
    check_coef,
    check_cu_seqlens_values,
    check_mask_values,
    check_weights_values,
)
from klfast.types.dtypes import arithmetic_dtype
from klfast.types.names import EstimatorName, ReductionName
from klfast.types.reduction import REDUCTIONS, Reduction

AS_IT_IS = Estimator("k1")
"""The estimator of values that are reduced as they are."""


class Choices(NamedTuple):
    """The choices of a spec as the ops take them: positions in lists, and 0 or 1."""

    estimator: int
    gradient: int
    importance: int
    clip_weighted: int
    result: int
    own_length: int
    over: int


class Numbers(NamedTuple):
    """The numbers of a spec as the ops take them, ``NO_LIMIT`` for an absent limit."""

    importance_cap: float
    log_ratio_low: float
    log_ratio_high: float
    linear_tail: float
    kl_clip: float
    coef: float
    """1 if the coefficient is a tensor."""
    normalizer: float
    """0 if there is none, or if it is a tensor."""


class Spec(NamedTuple):
    """The estimator, reduction and factors, which are numbers or 0-dim tensors."""

    estimator: Estimator
    reduction: Reduction
    coef: float | Tensor = 1.0
    normalizer: float | Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """``coef`` and ``normalizer`` if they are tensors, else None."""
        _, _, coef, normalizer = self
        return (
            coef if isinstance(coef, Tensor) else None,
            normalizer if isinstance(normalizer, Tensor) else None,
        )

    def encoded(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The spec as the ops take it after the tensors: ``Choices`` and ``Numbers`` as tuples,
        because torch's dispatcher reads tuples faster.
        """
        choices, limits = self.estimator.encoded()
        coef = 1.0 if isinstance(self.coef, Tensor) else self.coef
        normalizer = self.normalizer
        if normalizer is None or isinstance(normalizer, Tensor):
            normalizer = 0.0
        return (
            (*choices, *self.reduction.encoded()),
            (*limits, coef, normalizer),
        )


class PenaltyCall(NamedTuple):
    """Arguments of ``kl_penalty``, ``kl_rewards`` (with ``scores``) or ``reduce``.

    Only ``logprobs`` and ``ref_logprobs`` may carry a graph. The checks have detached the rest.
    """

    logprobs: Tensor
    """The log-probs. Without ``ref_logprobs``, the values that are reduced."""
    ref_logprobs: Tensor | None
    old_logprobs: Tensor | None
    mask: Tensor | None
    weights: Tensor | None
    """In the shape of ``logprobs``, or [S, 1]."""
    cu_seqlens: Tensor | None
    spec: Spec
    return_stats: bool = False
    scores: Tensor | None = None
    is_of_rows: bool = False
    """True if there is one value per row of logits. With so few values a second read costs less
    than to scale a gradient."""

    def first(self) -> Tensor:
        """The tensor that has the shape and the device of the call."""
        return self.logprobs

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of the ops: the six of the call, ``coef``, ``normalizer``."""
        return *self[:6], *self.spec.tensors()

    def arithmetic(self) -> torch.dtype:
        """The dtype of arithmetic and results."""
        return arithmetic_dtype(*self[:3])

    def check_values(self) -> None:
        """Raise ValueError if a mask, weights, cu_seqlens, coef or normalizer has a wrong value."""
        if self.mask is not None:
            check_mask_values(self.mask, self.arithmetic())
        if self.cu_seqlens is not None:
            check_cu_seqlens_values(self.cu_seqlens, self.first().shape[0])
        if self.weights is not None:
            check_weights_values(self.weights, self.mask, self.first(), self.cu_seqlens)
        self._check_coef()
        if isinstance(self.spec.normalizer, Tensor):
            check_number("normalizer", self.spec.normalizer.item(), above=0)

    def explain(self) -> None:
        """Raise ValueError if a tensor on a CPU or a number has a value that kernels refuse."""
        if not are_tracing() and self.first().device.type == "cpu":
            self.check_values()
        elif not isinstance(self.spec.coef, Tensor):
            self._check_coef()

    def _check_coef(self) -> None:
        name = "coef" if self.scores is None else "kl_coef"
        check_coef(name, self.spec.coef, self.arithmetic())


def penalty_call(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    estimator: EstimatorName | Estimator,
    reduction: ReductionName,
    cu_seqlens: Tensor | None,
    old_logprobs: Tensor | None,
    weights: Tensor | None,
    normalizer: float | Tensor | None,
    coef: Coefficient,
    return_stats: bool,
) -> PenaltyCall:
    """The arguments of ``kl_penalty`` except ``backend``, after every check that needs no data."""
    check_reduction(reduction, is_normalized=normalizer is not None)
    check("kl_penalty", cu_seqlens, logprobs, ref_logprobs, old_logprobs, mask, weights)
    spec = Spec(
        as_estimator(estimator),
        REDUCTIONS[reduction],
        coef_argument("coef", coef, logprobs),
        check_normalizer(normalizer, logprobs),
    )
    if spec.estimator.gradient == "none":
        logprobs, ref_logprobs = logprobs.detach(), ref_logprobs.detach()
    return PenaltyCall(
        logprobs,
        ref_logprobs,
        without_graph(old_logprobs),
        mask,
        per_token_or_row(weights, logprobs.shape),
        contiguous(cu_seqlens),
        spec,
        return_stats,
    )


def rewards_call(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    kl_coef: Coefficient,
    estimator: EstimatorName | Estimator,
    cu_seqlens: Tensor | None,
    return_stats: bool,
) -> PenaltyCall:
    """The arguments of ``kl_rewards`` except ``backend``, after every check that needs no data."""
    check("kl_rewards", cu_seqlens, logprobs, ref_logprobs, mask, scores)
    spec = Spec(
        as_estimator(estimator),
        REDUCTIONS["none"],
        coef_argument("kl_coef", kl_coef, logprobs),
    )
    return PenaltyCall(
        logprobs.detach(),
        ref_logprobs.detach(),
        None,
        mask,
        None,
        contiguous(cu_seqlens),
        spec,
        return_stats,
        scores.detach(),
    )


def reduce_call(
    values: Tensor,
    mask: Tensor | None,
    reduction: ReductionName,
    weights: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: float | Tensor | None,
    coef: Coefficient,
) -> PenaltyCall:
    """The arguments of ``reduce`` after every check that needs no data."""
    check_reduction(reduction, is_normalized=normalizer is not None)
    check("reduce", cu_seqlens, values, mask, weights)
    spec = Spec(
        AS_IT_IS,
        REDUCTIONS[reduction],
        coef_argument("coef", coef, values, of="values"),
        check_normalizer(normalizer, values, of="values"),
    )
    weights = per_token_or_row(weights, values.shape)
    return PenaltyCall(values, None, None, mask, weights, contiguous(cu_seqlens), spec)


def per_token_or_row(weights: Tensor | None, tokens: torch.Size) -> Tensor | None:
    """Checked weights in the shape of the tokens, or [S, 1] if there is one for each sequence."""
    if weights is None or weights.shape == tokens or weights.dim() == 2:
        return weights
    return weights.unsqueeze(-1)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
