"""The call object: the checked arguments of one call, as a backend takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.checks import (
    Coefficient,
    check_flag,
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
from klfast.types.reduction import ENCODED, Reduction

AS_IT_IS = Estimator("k1")  # the estimator of values that are reduced as they are


# Named tuples of arguments have methods and no properties, and are made without _make, because
# torch 2.10's dynamo can trace neither.


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
    coef: float  # 1 if the coefficient is a tensor
    normalizer: float  # 0 if there is none, or if it is a tensor


class Spec(NamedTuple):
    """The estimator, reduction and factors, which are numbers or 0-dim tensors."""

    estimator: Estimator
    reduction: Reduction
    coef: float | Tensor = 1.0
    normalizer: float | Tensor | None = None

    def encoded(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The spec as the ops take it after the tensors: ``Choices`` and ``Numbers``."""
        # As plain tuples, which torch's dispatcher reads faster.
        estimator, reduction, coef, normalizer = self
        choices, limits = estimator.encoded()
        is_traced = torch.compiler.is_compiling()
        of_result = reduction.encoded() if is_traced else ENCODED[reduction]
        if isinstance(coef, Tensor):
            coef = 1.0
        if normalizer is None or isinstance(normalizer, Tensor):
            normalizer = 0.0
        return (*choices, *of_result), (*limits, coef, normalizer)


class Reducing(NamedTuple):
    """The arguments of a reduction as public functions take them."""

    reduction: ReductionName = "none"
    weights: Tensor | None = None
    cu_seqlens: Tensor | None = None
    normalizer: float | Tensor | None = None
    coef: Coefficient = 1.0
    return_stats: bool = False


class Reduced(NamedTuple):
    """A checked reduction of per-token values: fields of a ``PenaltyCall``, in their order."""

    mask: Tensor | None
    weights: Tensor | None  # in the shape of the tokens, or [S, 1]
    cu_seqlens: Tensor | None
    spec: Spec
    return_stats: bool

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        mask: Tensor | None,
        reducing: Reducing,
        estimator: Estimator = AS_IT_IS,
        coef_name: str = "coef",
    ) -> Reduced:
        """The reduction of a call's tokens, after every check that needs no data."""
        name, weights, cu_seqlens, normalizer, coef, return_stats = reducing
        like, of = tokens.tensor, tokens.name
        flag: Any = return_stats
        if flag is not True and flag is not False:  # mostly no call
            check_flag("return_stats", flag)
        reduction = reduction_of(name, is_normalized=normalizer is not None)
        if normalizer is not None:
            normalizer = scalar_argument("normalizer", normalizer, like, of, above=0)
        coef = coef_argument(coef_name, coef, like, of)
        # One per sequence. If as many tokens as sequences are packed, weights are per token.
        if weights is not None and weights.dim() < 2 and weights.shape != tokens.shape:
            weights = weights.unsqueeze(-1)
        # Kernels read its neighbours without a stride.
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        spec = Spec(estimator, reduction, coef, normalizer)
        return cls(mask, weights, cu_seqlens, spec, return_stats)

    def check_values(self, tokens: torch.Size, dtype: torch.dtype, coef_name: str) -> None:
        """Raise ValueError if a mask, weights, cu_seqlens, coef or normalizer has a wrong value."""
        mask, weights, cu_seqlens, (_, _, coef, normalizer), _ = self
        if mask is not None:
            check_mask_values(mask, dtype)
        if cu_seqlens is not None:
            check_cu_seqlens_values(cu_seqlens, tokens[0])
        if weights is not None:
            check_weights_values(weights, mask, weights.new_empty(()).expand(tokens), cu_seqlens)
        check_coef(coef_name, coef, dtype)
        if isinstance(normalizer, Tensor):
            check_number("normalizer", normalizer.item(), above=0)


class PenaltyCall(NamedTuple):
    """Arguments of ``kl_penalty``, ``kl_rewards`` (with ``scores``) or ``reduce``.

    Only ``logprobs`` and ``ref_logprobs`` may carry a graph. The checks have detached the rest.
    """

    # The log-probs. Without ref_logprobs, the values that are reduced.
    logprobs: Tensor
    ref_logprobs: Tensor | None
    old_logprobs: Tensor | None
    mask: Tensor | None
    weights: Tensor | None  # in the shape of logprobs, or [S, 1]
    cu_seqlens: Tensor | None
    spec: Spec
    return_stats: bool = False
    scores: Tensor | None = None
    # True if there is one value per row of logits. With so few values a second read costs less than
    # to scale a gradient.
    is_of_rows: bool = False

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of the ops: the six of the call, ``coef``, ``normalizer``."""
        _, _, coef, normalizer = self.spec
        return (
            *self[:6],
            coef if isinstance(coef, Tensor) else None,
            normalizer if isinstance(normalizer, Tensor) else None,
        )

    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(*self[:3])

    def coef_argument(self) -> str:
        """The name of the coefficient in the public function."""
        return "coef" if self.scores is None else "kl_coef"

    def check_values(self) -> None:
        """Raise ValueError if a mask, weights, cu_seqlens, coef or normalizer has a wrong value."""
        reduced = Reduced(*self[3:8])
        reduced.check_values(self.logprobs.shape, self.arithmetic(), self.coef_argument())

    def check_numbers(self) -> None:
        """Raise ValueError for a refused number, which every device lets the host read."""
        if not isinstance(self.spec.coef, Tensor):
            check_coef(self.coef_argument(), self.spec.coef, self.arithmetic())


def penalty_call(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    estimator: EstimatorName | Estimator,
    reducing: Reducing,
    old_logprobs: Tensor | None = None,
) -> PenaltyCall:
    """The arguments of ``kl_penalty`` except ``backend``, after every check that needs no data."""
    tokens = Tokens.of("kl_penalty", logprobs, reducing.cu_seqlens)
    tokens.check(
        ref_logprobs=ref_logprobs, old_logprobs=old_logprobs, mask=mask, weights=reducing.weights
    )
    estimator = as_estimator(estimator)
    # Backends then save nothing, as no input requires a gradient.
    if estimator.gradient == "none":
        logprobs, ref_logprobs = logprobs.detach(), ref_logprobs.detach()
    if old_logprobs is not None and old_logprobs.requires_grad:
        old_logprobs = old_logprobs.detach()
    reduced = Reduced.of(tokens, mask, reducing, estimator)
    return PenaltyCall(logprobs, ref_logprobs, old_logprobs, *reduced)


def rewards_call(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    estimator: EstimatorName | Estimator,
    reducing: Reducing,
) -> PenaltyCall:
    """The arguments of ``kl_rewards`` except ``backend``, after every check that needs no data."""
    tokens = Tokens.of("kl_rewards", logprobs, reducing.cu_seqlens)
    tokens.check(ref_logprobs=ref_logprobs, mask=mask, scores=scores)
    reduced = Reduced.of(tokens, mask, reducing, as_estimator(estimator), "kl_coef")
    return PenaltyCall(logprobs.detach(), ref_logprobs.detach(), None, *reduced, scores.detach())


def reduce_call(values: Tensor, mask: Tensor | None, reducing: Reducing) -> PenaltyCall:
    """The arguments of ``reduce`` after every check that needs no data."""
    tokens = Tokens.of("reduce", values, reducing.cu_seqlens)
    tokens.check(mask=mask, weights=reducing.weights)
    return PenaltyCall(values, None, None, *Reduced.of(tokens, mask, reducing))
