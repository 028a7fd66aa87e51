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
    check_number,
    coef_argument,
    reduction_of,
    scalar_argument,
)
from klfast.args.estimator import Estimator, as_estimator
from klfast.args.signature import Tokens
from klfast.args.values import (
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

    def encoded(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The spec as the ops take it after the tensors: ``Choices`` and ``Numbers`` as tuples,
        because torch's dispatcher reads tuples faster.
        """
        estimator, reduction, coef, normalizer = self
        choices, limits = estimator.encoded()
        if isinstance(coef, Tensor):
            coef = 1.0
        if normalizer is None or isinstance(normalizer, Tensor):
            normalizer = 0.0
        return (*choices, *reduction.encoded()), (*limits, coef, normalizer)

    def check_values(self, coef: str, dtype: torch.dtype) -> None:
        """Raise ValueError for a refused coefficient, the argument ``coef``, or normalizer."""
        check_coef(coef, self.coef, dtype)
        if isinstance(self.normalizer, Tensor):
            check_number("normalizer", self.normalizer.item(), above=0)


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

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of the ops: the six of the call, ``coef``, ``normalizer``."""
        _, _, coef, normalizer = self.spec
        return (
            *self[:6],
            coef if isinstance(coef, Tensor) else None,
            normalizer if isinstance(normalizer, Tensor) else None,
        )

    def arithmetic(self) -> torch.dtype:
        """The dtype of arithmetic and results."""
        return arithmetic_dtype(*self[:3])

    def coef_argument(self) -> str:
        """The name of the coefficient in the public function."""
        return "coef" if self.scores is None else "kl_coef"

    def check_values(self) -> None:
        """Raise ValueError if a mask, weights, cu_seqlens, coef or normalizer has a wrong value."""
        dtype = self.arithmetic()
        shape = self.logprobs.shape
        check_reduced_values(self.mask, self.weights, self.cu_seqlens, shape, dtype)
        self.spec.check_values(self.coef_argument(), dtype)

    def check_numbers(self) -> None:
        """Raise ValueError for a refused number, which every device lets the host read."""
        if not isinstance(self.spec.coef, Tensor):
            check_coef(self.coef_argument(), self.spec.coef, self.arithmetic())


def check_reduced_values(
    mask: Tensor | None,
    weights: Tensor | None,
    cu_seqlens: Tensor | None,
    tokens: torch.Size,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError if a tensor of a reduction of ``tokens`` has a wrong value."""
    if mask is not None:
        check_mask_values(mask, dtype)
    if cu_seqlens is not None:
        check_cu_seqlens_values(cu_seqlens, tokens[0])
    if weights is not None:
        check_weights_values(weights, mask, weights.new_empty(()).expand(tokens), cu_seqlens)


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
    Tokens.of("kl_penalty", logprobs, cu_seqlens).check(
        ref_logprobs=ref_logprobs, old_logprobs=old_logprobs, mask=mask, weights=weights
    )
    if normalizer is not None:
        normalizer = scalar_argument("normalizer", normalizer, logprobs, above=0)
    estimator = as_estimator(estimator)
    if estimator.gradient == "none":
        logprobs, ref_logprobs = logprobs.detach(), ref_logprobs.detach()
    if old_logprobs is not None and old_logprobs.requires_grad:
        old_logprobs = old_logprobs.detach()
    if weights is not None:
        weights = per_token_or_row(weights, logprobs.shape)
    return PenaltyCall(
        logprobs,
        ref_logprobs,
        old_logprobs,
        mask,
        weights,
        cu_seqlens if cu_seqlens is None else cu_seqlens.contiguous(),
        Spec(
            estimator,
            reduction_of(reduction, is_normalized=normalizer is not None),
            coef_argument("coef", coef, logprobs),
            normalizer,
        ),
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
    Tokens.of("kl_rewards", logprobs, cu_seqlens).check(
        ref_logprobs=ref_logprobs, mask=mask, scores=scores
    )
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
        None if cu_seqlens is None else cu_seqlens.contiguous(),
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
    Tokens.of("reduce", values, cu_seqlens).check(mask=mask, weights=weights)
    of = reduction_of(reduction, is_normalized=normalizer is not None)
    if normalizer is not None:
        normalizer = scalar_argument("normalizer", normalizer, values, of="values", above=0)
    spec = Spec(AS_IT_IS, of, coef_argument("coef", coef, values, of="values"), normalizer)
    if weights is not None:
        weights = per_token_or_row(weights, values.shape)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    return PenaltyCall(values, None, None, mask, weights, cu_seqlens, spec)


def per_token_or_row(weights: Tensor, tokens: torch.Size) -> Tensor:
    """Checked weights in the shape of the tokens, or [S, 1] if there is one for each sequence."""
    if weights.shape == tokens or weights.dim() == 2:
        return weights
    return weights.unsqueeze(-1)
