"""The host side of the Triton kernels: what the ops of ``klfast_triton`` run.

Arguments have been checked in Python before. The kernels stay inside their tensors whatever these
hold; shapes are taken at their word.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.penalty import Choices, Numbers
from klfast.backends.triton import penalty_kernels as kernels
from klfast.backends.triton.launch import (
    ACC,
    DEFINED,
    batch_of,
    bits,
    device_of,
    layout,
    limit,
    strides,
)
from klfast.backends.triton.math import ESTIMATORS as FORMULAS
from klfast.backends.triton.math import LOG_LARGEST
from klfast.backends.triton.segments import TILE
from klfast.backends.triton.statistics import ALWAYS
from klfast.backends.triton.tokens import Form
from klfast.ops.schemas import Arguments, PenaltyOutputs, empty_outputs
from klfast.types.dtypes import arithmetic_dtype
from klfast.types.names import ESTIMATORS as NAMES
from klfast.types.names import GRADIENTS, IMPORTANCE
from klfast.types.reduction import DENOMINATORS, RESULTS

_TILE = TILE.value
_FEW_FIELDS = ALWAYS.value
_ALL_FIELDS = kernels.LAST_KEPT.value + 1
"""Rows of the partial results: the statistics of every call, and all."""
_FEW, _MANY = 128, 1024  # sequences of a program that combines
_SCALE_PROGRAMS = 1024  # enough for any device, and few to start for nothing


class _Formulas(NamedTuple):
    """An estimator as the kernels take it."""

    functions: dict[str, Any]
    weighs: bool
    limits: tuple[int, ...]


@functools.cache
def _formulas(choices: Choices, limits: tuple[float, ...], weighs: bool, acc: str) -> _Formulas:
    cap, low, high, tail, clip = map(limit, limits)
    form = Form(
        weighs=weighs,
        detached=IMPORTANCE[choices.importance] == "detached",
        caps=weighs and math.isfinite(cap),
        clips_log_ratio=math.isfinite(low) or math.isfinite(high),
        linear_tail=math.isfinite(tail),
        clips_value=math.isfinite(clip),
        clip_weighted=weighs and bool(choices.clip_weighted),
        k2_gradient=GRADIENTS[choices.gradient] == "k2",
        log_largest=LOG_LARGEST[acc],
    )
    formula = FORMULAS[NAMES[choices.estimator]]
    functions = {
        "VALUE": formula.value,
        "DERIVATIVE": formula.derivative,
        "SUM": formula.value_plus_derivative,
        "FORM": form,
    }
    numbers = (cap, math.log(cap), low, high, tail, clip)
    return _Formulas(functions, weighs, tuple(map(bits, numbers)))


class _Call:
    """The arguments of both ops, and the launches that they share."""

    def __init__(self, a: Arguments) -> None:
        self.inputs = (a.logprobs, a.ref_logprobs, a.old_logprobs, a.mask)
        self.weighting = a.weighting
        self.batch = batch_of(a.logprobs, a.cu_seqlens)
        self.scalars = (a.coef, a.normalizer)
        decoded, of_spec = Choices(*a.choices), Numbers(*a.numbers)
        self.numbers = (bits(of_spec.coef), bits(of_spec.normalizer))
        weighs = a.old_logprobs is not None
        self.dtype = arithmetic_dtype(*self.inputs[:3])
        self.formulas = _formulas(decoded, of_spec[:5], weighs, ACC[self.dtype].name)
        self.normalized = of_spec.normalizer > 0 or a.normalizer is not None
        self.result = RESULTS[decoded.result]
        self.options = {
            "ACC": ACC[self.dtype],
            "OWN_LENGTH": bool(decoded.own_length),
            "OVER": DENOMINATORS[decoded.over],
            "NORMALIZED": self.normalized,
            **DEFINED,
        }

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.inputs[0].device)

    def read_tokens(
        self,
        gradient: str,
        weights: Tensor | None,
        grads: tuple[Tensor | None, Tensor | None],
        *,
        grad_out: Tensor | None = None,
        value: Tensor | None = None,
        partials: Tensor | None = None,
        statistics: bool = False,
        rewards: bool = False,
    ) -> None:
        """``kl_penalty_kernel`` over the batch."""
        batch = self.batch
        per_token = grad_out if gradient == "token" else None
        wide = self.dtype == torch.float64 or self.formulas.weighs  # more registers per token
        kernels.kl_penalty_kernel[(batch.slots,)](
            *self.inputs,
            self.weighting,
            batch.cu_seqlens,
            *self.scalars,
            grad_out,
            weights,
            value,
            *grads,
            partials,
            *self.numbers,
            *self.formulas.limits,
            batch.sequences,
            batch.width,
            batch.slots,
            *(stride for tensor in self.inputs for stride in strides(tensor)),
            *self._weighting_strides(),
            *strides(grad_out),
            **self.formulas.functions,
            **self.options,
            LAYOUT=layout(batch, *self.inputs, per_token),
            WEIGHTING="strided" if self._is_of_sequences() else layout(batch, self.weighting),
            GRADIENT=gradient,
            STATISTICS=statistics,
            REWARDS=rewards,
            num_warps=8 if wide else 4,
        )

    def _is_of_sequences(self) -> bool:
        """True if there is a weight for each sequence, [S, 1]."""
        weighting = self.weighting
        return weighting is not None and weighting.shape == (self.batch.sequences, 1)

    def _weighting_strides(self) -> tuple[int, int]:
        row, column = strides(self.weighting)
        return row, 0 if self._is_of_sequences() else column

    def combine(
        self,
        partials: Tensor | None,
        weights: Tensor,
        result: Tensor | None,
        *,
        stores_weights: bool,
        statistics: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> None:
        """Combine partial results into weights, statistics and the result."""
        batch = self.batch
        scalar = self.result == "scalar"
        few = batch.sequences <= _FEW
        many = scalar and batch.sequences > _MANY
        block = _FEW if few or many or not scalar else _MANY
        sums = self.empty(2, batch.sequences, dtype=torch.float64) if many else None
        kernels.combine_kernel[(-(-batch.sequences // block),)](
            partials,
            batch.cu_seqlens,
            *self.scalars,
            scores,
            weights,
            statistics,
            result,
            sums,
            *self.numbers,
            batch.sequences,
            batch.width,
            batch.slots,
            **self.options,
            SCALAR=scalar,
            MASKED=self.inputs[3] is not None,
            SUMMED=statistics is not None or (result is not None and scores is None),
            WEIGHTS=stores_weights,
            WEIGHTED=self.weighting is not None,
            STATISTICS=statistics is not None,
            BLOCK=block,
            num_warps=4 if block == _FEW else 16,
        )
        if many:
            kernels.total_kernel[(1,)](
                sums,
                *self.scalars,
                weights,
                result,
                *self.numbers,
                batch.sequences,
                **self.options,
                WEIGHTS=stores_weights,
                BLOCK=_MANY,
                num_warps=8,
            )

    def weights_need_a_pass(self) -> bool:
        """True if the sequences' weights depend on the values of mask and cu_seqlens."""
        by_totals = self.options["OVER"] != "one" and not self.normalized
        by_length = self.options["OWN_LENGTH"]
        uneven = self.inputs[3] is not None or self.batch.cu_seqlens is not None
        return uneven and (by_totals or by_length)

    def find_weights(self, weights: Tensor) -> None:
        """The weights alone, before any token is read: the gradients of a mean need them."""
        batch, mask = self.batch, self.inputs[3]
        lengths = None
        if mask is not None:
            lengths = self.empty(_FEW_FIELDS, batch.slots, dtype=torch.float64)
            kernels.lengths_kernel[(batch.slots,)](
                mask,
                batch.cu_seqlens,
                lengths,
                batch.sequences,
                batch.width,
                batch.slots,
                *strides(mask),
                ACC=self.options["ACC"],
                LAYOUT=layout(batch, mask),
                num_warps=4,
                **DEFINED,
            )
        self.combine(lengths, weights, None, stores_weights=True)


def kl_penalty_fwd(a: Arguments) -> PenaltyOutputs:
    """The op of ``klfast.ops.schemas``."""
    call, scores = _Call(a), a.scores
    logprobs, slots = a.logprobs, call.batch.slots
    outputs: PenaltyOutputs = empty_outputs("kl_penalty_fwd", a)
    result, weights, statistics, first, second = outputs
    grads = first if a.want_grad_logprobs else None, second if a.want_grad_ref_logprobs else None
    if not a.want_weights:
        weights = call.empty(call.batch.sequences)
    if call.batch.sequences == 0:
        _set_to_0(result, *grads)
        return outputs

    per_token = call.result == "token"
    gradient = "none"
    partials = None
    if not per_token or a.want_statistics or scores is not None:
        rows = _ALL_FIELDS if a.want_statistics or scores is not None else _FEW_FIELDS
        partials = call.empty(rows, slots, dtype=torch.float64)
    with device_of(logprobs):
        if a.want_grad_logprobs or a.want_grad_ref_logprobs:
            gradient = "unit" if call.weights_need_a_pass() else "unit-of-shape"
        if gradient == "unit":
            call.find_weights(weights)
        call.read_tokens(
            gradient,
            weights,
            grads,
            value=result if per_token else None,
            partials=partials,
            statistics=a.want_statistics,
            rewards=scores is not None,
        )
        if partials is not None:
            call.combine(
                partials,
                weights,
                None if per_token and scores is None else result,
                stores_weights=gradient != "unit",
                statistics=statistics if a.want_statistics else None,
                scores=None if scores is None else scores.contiguous(),
            )
    return outputs


def _set_to_0(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.zero_()


def kl_penalty_bwd(a: Arguments) -> tuple[Tensor | None, Tensor | None]:
    """The op of ``klfast.ops.schemas``."""
    call = _Call(a)
    grads: tuple[Tensor | None, Tensor | None] = empty_outputs("kl_penalty_bwd", a)
    if call.batch.sequences == 0:
        _set_to_0(*grads)
    elif call.batch.slots > 0:
        with device_of(a.logprobs):
            call.read_tokens(call.result, a.weights.contiguous(), grads, grad_out=a.grad_out)
    return grads


def token_weights(a: Arguments) -> Tensor:
    """The op of ``klfast.ops.schemas``: the gradient of values that are all 0."""
    dtype = torch.float64 if a.is_double else torch.float32
    zeros = torch.zeros((), dtype=dtype, device=a.like.device).expand(a.like.shape)
    others = (a.mask, a.weighting, a.cu_seqlens, a.coef, a.normalizer, a.choices, a.numbers)
    values = (zeros, None, None, *others, None, False, True, False, False)
    return kl_penalty_fwd(Arguments.of("kl_penalty_fwd", values))[3].view(-1)


def scale_(a: Arguments) -> None:
    """The op of ``klfast.ops.schemas``."""
    tensor = a.tensor
    size = tensor.numel()
    if size == 0:
        return
    aligned = size % 8 == 0 and tensor.data_ptr() % 16 == 0
    with device_of(tensor):
        kernels.scale_kernel[(min(-(-size // _TILE), _SCALE_PROGRAMS),)](
            tensor,
            a.factor,
            size,
            ACC=ACC[arithmetic_dtype(tensor)],
            LAYOUT="aligned" if aligned else "unit",
            num_warps=4,
            **DEFINED,
        )
