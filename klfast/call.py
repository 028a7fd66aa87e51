"""The call object: the arguments of one call after every check, on their way to a backend.

Named tuples here have methods and no properties, and are made without ``_make``: dynamo of torch
2.10 follows neither.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klfast.checks.arguments import (
    check_cu_seqlens,
    check_device,
    check_normalizer,
    check_number,
    check_reduction,
    check_tensor,
    shape_text,
    without_graph,
)
from klfast.checks.values import (
    are_tracing,
    check_coef,
    check_cu_seqlens_values,
    check_mask_values,
)
from klfast.coefficient import Coefficient, coef_argument
from klfast.dtypes import FLOATS, MASKS, arithmetic_dtype
from klfast.estimator import Estimator, as_estimator
from klfast.layout import number_of_sequences
from klfast.names import EstimatorName, ReductionName
from klfast.reduction import REDUCTIONS, Reduction


class LogProbs(NamedTuple):
    """A source of numbers per token: log-probs, of which an estimator makes them.

    Only ``logprobs`` and ``ref_logprobs`` may carry a graph; validation has detached the rest.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    old_logprobs: Tensor | None = None


class Values(NamedTuple):
    """A source of numbers per token: the numbers themselves, which may carry a graph."""

    values: Tensor
    of_rows: bool = False
    """One number a row of logits: so few that a second read costs less than a gradient scaled."""

    def tensors(self) -> tuple[Tensor, None, None]:
        """The source as the ops take it: no reference is a log-ratio that is there already."""
        return self.values, None, None


AS_IT_IS = Estimator("k1")
"""The estimator of ``Values``."""


class Layout(NamedTuple):
    """Which tokens exist, with what weights, and which sequences they make."""

    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None


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
    """1 where it is a tensor."""
    normalizer: float
    """0 where there is none, or a tensor."""


class Spec(NamedTuple):
    """The estimator, reduction and factors, which are numbers or 0-dim tensors."""

    estimator: Estimator
    reduction: Reduction
    coef: float | Tensor = 1.0
    normalizer: float | Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """``coef`` and ``normalizer``, where they are tensors."""
        return (
            self.coef if isinstance(self.coef, Tensor) else None,
            self.normalizer if isinstance(self.normalizer, Tensor) else None,
        )

    def encoded(self) -> tuple[Choices, Numbers]:
        """The spec as the ops take it, behind the tensors."""
        coef = 1.0 if isinstance(self.coef, Tensor) else self.coef
        normalizer = self.normalizer
        if normalizer is None or isinstance(normalizer, Tensor):
            normalizer = 0.0
        return (
            Choices(*self.estimator.choices, *self.reduction.encoded()),
            Numbers(*self.estimator.limits, coef, normalizer),
        )


class PenaltyCall(NamedTuple):
    """Arguments of ``kl_penalty`` (with ``scores``, of ``kl_rewards``): source, layout, spec, and
    what is wanted.
    """

    source: LogProbs | Values
    layout: Layout
    spec: Spec
    return_stats: bool
    scores: Tensor | None = None

    def first(self) -> Tensor:
        """The tensor that has the shape and the device of the call."""
        return self.source[0]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of the ops: three of the source, two of the layout, two of the
        spec.
        """
        source = self.source.tensors() if isinstance(self.source, Values) else self.source
        return *source, *self.layout, *self.spec.tensors()

    def arithmetic(self) -> torch.dtype:
        """The dtype of arithmetic and results."""
        return arithmetic_dtype(*self.tensors()[:3])

    def check_values(self) -> None:
        """Raise ValueError if a mask, cu_seqlens, coef or normalizer holds what it must not."""
        if self.layout.mask is not None:
            check_mask_values(self.layout.mask, self.arithmetic())
        if self.layout.cu_seqlens is not None:
            check_cu_seqlens_values(self.layout.cu_seqlens, self.first().shape[0])
        self._check_coef()
        if isinstance(self.spec.normalizer, Tensor):
            check_number("normalizer", self.spec.normalizer.item(), above=0)

    def explain(self) -> None:
        """Raise ValueError for a value that kernels refuse: in tensors on a CPU, and in numbers."""
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
    normalizer: float | Tensor | None,
    coef: Coefficient,
    return_stats: bool,
) -> PenaltyCall:
    """The arguments of ``kl_penalty`` after every check that needs no data, all but ``backend``."""
    check_reduction(reduction, normalizer)
    check_layout("logprobs", logprobs, cu_seqlens)
    check_like("ref_logprobs", ref_logprobs, logprobs, FLOATS)
    if old_logprobs is not None:
        check_like("old_logprobs", old_logprobs, logprobs, FLOATS)
    if mask is not None:
        check_like("mask", mask, logprobs, MASKS)
    spec = Spec(
        as_estimator(estimator),
        REDUCTIONS[reduction],
        coef_argument("coef", coef, logprobs),
        check_normalizer(normalizer, logprobs),
    )
    if spec.estimator.gradient == "none":
        logprobs, ref_logprobs = logprobs.detach(), ref_logprobs.detach()
    return PenaltyCall(
        LogProbs(logprobs, ref_logprobs, without_graph(old_logprobs)),
        layout_of(mask, cu_seqlens),
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
    """The arguments of ``kl_rewards`` after every check that needs no data, all but ``backend``."""
    call = penalty_call(
        logprobs, ref_logprobs, mask, estimator, "none", cu_seqlens, None, None, 1.0, return_stats
    )
    coef = coef_argument("kl_coef", kl_coef, logprobs)
    check_tensor("scores", scores, MASKS)
    sequences = number_of_sequences(logprobs, cu_seqlens)
    if tuple(scores.shape) != (sequences,):
        raise ValueError(
            f"scores must have shape [{sequences}], one per sequence, got {shape_text(scores)}"
        )
    check_device("scores", scores, logprobs)
    return call._replace(
        source=LogProbs(logprobs.detach(), ref_logprobs.detach()),
        spec=call.spec._replace(coef=coef),
        scores=scores.detach(),
    )


def reduce_call(
    values: Tensor,
    mask: Tensor | None,
    reduction: ReductionName,
    cu_seqlens: Tensor | None,
    normalizer: float | Tensor | None,
    coef: Coefficient,
) -> PenaltyCall:
    """The arguments of ``reduce`` after every check that needs no data."""
    check_reduction(reduction, normalizer)
    check_layout("values", values, cu_seqlens)
    if mask is not None:
        check_like("mask", mask, values, MASKS, of="values")
    spec = Spec(
        AS_IT_IS,
        REDUCTIONS[reduction],
        coef_argument("coef", coef, values, of="values"),
        check_normalizer(normalizer, values, of="values"),
    )
    return PenaltyCall(Values(values), layout_of(mask, cu_seqlens), spec, return_stats=False)


def of_rows(rows: Tensor, layout: Layout, spec: Spec, return_stats: bool) -> PenaltyCall:
    """The call that reduces one number a row of logits, in the shape of the tokens."""
    return PenaltyCall(Values(rows, of_rows=True), layout, spec, return_stats)


def layout_of(mask: Tensor | None, cu_seqlens: Tensor | None) -> Layout:
    """The layout that checked arguments say."""
    return Layout(mask, None if cu_seqlens is None else cu_seqlens.contiguous())


def check_layout(
    argument: str,
    tokens: Tensor,
    cu_seqlens: Tensor | None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    """The shapes of padded or packed tokens, and what needs no data of cu_seqlens."""
    check_tensor(argument, tokens, dtypes)
    if cu_seqlens is None:
        if tokens.dim() not in (1, 2):
            raise ValueError(f"{argument} must have shape [B, T] or [N], got {shape_text(tokens)}")
        return
    if tokens.dim() != 1:
        raise ValueError(
            f"{argument} must be packed, of shape [N], with cu_seqlens, got {shape_text(tokens)}"
        )
    check_cu_seqlens(cu_seqlens, tokens, of=argument)


def check_like(
    argument: str,
    value: object,
    like: Tensor,
    dtypes: tuple[torch.dtype, ...],
    of: str = "logprobs",
) -> None:
    """A tensor of one of the dtypes, with the shape and on the device of the argument ``of``."""
    tensor = check_tensor(argument, value, dtypes)
    if tensor.shape != like.shape:
        raise ValueError(
            f"{argument} must have the shape of {of}, {shape_text(like)}, got {shape_text(tensor)}"
        )
    check_device(argument, tensor, like, of)
