"""The host side of the Triton kernels: what the ops of ``klfast_triton`` run.

Each ``planned`` function is the op of its name in ``klfast.ops.schemas``. Arguments have been
checked in Python before. The kernels stay inside their tensors whatever these hold; shapes are
taken at their word.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from klfast.args.penalty import Choices, Numbers
from klfast.backends.triton import penalty_kernels as kernels
from klfast.backends.triton.launch import ACC, batch_of, bits, layout, limit, strides
from klfast.backends.triton.math import ESTIMATORS as FORMULAS
from klfast.backends.triton.math import LOG_LARGEST
from klfast.backends.triton.plan import Recording, planned
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
    # Kernels compare the logarithm of a weight with the logarithm of the cap, because a weight may
    # overflow.
    numbers = (cap, math.log(cap), low, high, tail, clip)
    return _Formulas(functions, weighs, tuple(map(bits, numbers)))


@functools.cache
def _reduced(dtype: torch.dtype, own_length: int, over: int, normalized: bool) -> kernels.Reduced:
    fields = (ACC[dtype], bool(own_length), DENOMINATORS[over], normalized)
    return kernels.Reduced(*map(tl.constexpr, fields))


class _TokensCall:
    """The arguments of both ops, and the launches that they share."""

    def __init__(self, a: Arguments, record: Recording) -> None:
        self.record = record
        self.inputs = (a.logprobs, a.ref_logprobs, a.old_logprobs, a.mask)
        self.batch = batch_of(a.logprobs, a.cu_seqlens)
        self.weighting, self.weighting_layout = a.weighting, None
        self.weighting_strides = strides(a.weighting)
        if a.weighting is not None:  # without, a layout would make another variant of the kernel
            self.weighting_layout = layout(self.batch, a.weighting)
            if a.weighting.shape == (self.batch.sequences, 1):  # all tokens of a sequence share one
                self.weighting_layout, self.weighting_strides = (
                    "strided",
                    (a.weighting.stride(0), 0),
                )
        self.scalars = (a.coef, a.normalizer)
        decoded, of_spec = Choices(*a.choices), Numbers(*a.numbers)
        weighs = a.old_logprobs is not None
        self.dtype = arithmetic_dtype(*self.inputs[:3])
        self.formulas = _formulas(decoded, of_spec[:5], weighs, ACC[self.dtype].name)
        normalized = of_spec.normalizer > 0 or a.normalizer is not None
        self.result = RESULTS[decoded.result]
        self.reduced = _reduced(self.dtype, decoded.own_length, decoded.over, normalized)

    def read_tokens(
        self,
        gradient: str,
        weights: Tensor | None,
        grads: tuple[Tensor | None, Tensor | None],
        *,
        grad_out: Tensor | None = None,
        value: Tensor | None = None,
        partials: Tensor | None = None,
        result: Tensor | None = None,
        statistics: Tensor | None = None,
        rewards: bool = False,
        finishes: bool = False,
    ) -> None:
        """``kl_penalty_kernel`` over the batch."""
        batch = self.batch
        # Other incoming gradients are one number per sequence or call, and decide no layout.
        per_token = grad_out if gradient == "token" else None
        wide = self.dtype == torch.float64 or self.formulas.weighs  # more registers per token
        self.record.launch(
            kernels.kl_penalty_kernel,
            batch.slots,
            *self.inputs,
            self.weighting,
            batch.cu_seqlens,
            *self.scalars,
            grad_out,
            weights,
            value,
            *grads,
            partials,
            *((result, statistics) if finishes else (None, None)),
            *self.formulas.limits,
            batch.sequences,
            batch.width,
            batch.slots,
            *(stride for tensor in self.inputs for stride in strides(tensor)),
            *self.weighting_strides,
            *strides(grad_out),
            **self.formulas.functions,
            REDUCED=self.reduced,
            LAYOUT=layout(batch, *self.inputs, per_token),
            WEIGHTING=self.weighting_layout,
            GRADIENT=gradient,
            STATISTICS=statistics is not None,
            REWARDS=rewards,
            FINISHES=finishes,
            num_warps=8 if wide else 4,
        )

    def combine(
        self,
        partials: Tensor | None,
        weights: Tensor | None,
        result: Tensor | None,
        *,
        stores_weights: bool,
        statistics: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> None:
        """Combine partial results into weights, statistics and the result."""
        batch = self.batch
        scalar = self.result == "scalar"
        # A scalar needs all sequences in one program, if that can hold them. Other results take
        # small blocks, whose programs run side by side.
        few = batch.sequences <= _FEW
        many = scalar and batch.sequences > _MANY
        block = _FEW if few or many or not scalar else _MANY
        sums = self.record.empty(2, batch.sequences, dtype=torch.float64) if many else None
        self.record.launch(
            kernels.combine_kernel,
            -(-batch.sequences // block),
            partials,
            batch.cu_seqlens,
            *self.scalars,
            *(scores, weights, statistics, result, sums),
            *(batch.sequences, batch.width, batch.slots),
            REDUCED=self.reduced,
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
            self.record.launch(
                kernels.total_kernel,
                1,
                sums,
                *self.scalars,
                *(weights, result, batch.sequences),
                REDUCED=self.reduced,
                WEIGHTS=stores_weights,
                BLOCK=_MANY,
                num_warps=8,
            )

    def weights_need_a_pass(self) -> bool:
        """True if the sequences' weights depend on the values of mask and cu_seqlens."""
        _, own_length, over, normalized = (constant.value for constant in self.reduced)
        uneven = self.inputs[3] is not None or self.batch.cu_seqlens is not None
        return uneven and (own_length or (over != "one" and not normalized))

    def find_weights(self, weights: Tensor) -> None:
        """The weights alone, before any token is read: the gradients of a mean need them."""
        batch, mask = self.batch, self.inputs[3]
        lengths = None
        if mask is not None:
            lengths = self.record.empty(_FEW_FIELDS, batch.slots, dtype=torch.float64)
            self.record.launch(
                kernels.lengths_kernel,
                batch.slots,
                *(mask, batch.cu_seqlens, lengths),
                *(batch.sequences, batch.width, batch.slots),
                *strides(mask),
                ACC=ACC[self.dtype],
                LAYOUT=layout(batch, mask),
                num_warps=4,
            )
        self.combine(lengths, weights, None, stores_weights=True)


@planned
def kl_penalty_fwd(a: Arguments, record: Recording) -> PenaltyOutputs:
    call, scores = _TokensCall(a, record), a.scores
    sequences, slots = call.batch.sequences, call.batch.slots
    outputs: PenaltyOutputs = record.outputs(empty_outputs("kl_penalty_fwd", a))
    result, given, table, first, second = outputs
    grads = first if a.want_grad_logprobs else None, second if a.want_grad_ref_logprobs else None
    if sequences == 0:
        # No kernel runs for an empty batch, and the outputs have no values yet.
        _set_to_0(result, *grads)
        return outputs

    gradient = "none"
    weights = given if a.want_weights else None
    if a.want_grad_logprobs or a.want_grad_ref_logprobs:
        # A mean's gradient needs the lengths before the first token is read.
        gradient = "unit" if call.weights_need_a_pass() else "unit-of-shape"
    if gradient == "unit":
        weights = given if a.want_weights else record.empty(sequences, dtype=call.dtype)
        call.find_weights(weights)
    per_token, rewards = call.result == "token", scores is not None
    value, summed = (result, result if rewards else None) if per_token else (None, result)
    statistics = table if a.want_statistics else None
    partials = None
    sums = summed is not None or a.want_statistics
    is_segment = a.cu_seqlens is None and slots == sequences
    # A program that has all of a sequence finishes it. Not with scores, which combine_kernel adds,
    # nor for a scalar, which needs all sequences.
    finishes = sums and is_segment and not rewards and call.result != "scalar"
    if sums and not finishes:
        rows = _ALL_FIELDS if a.want_statistics or rewards else _FEW_FIELDS
        partials = record.empty(rows, slots, dtype=torch.float64)
    call.read_tokens(
        gradient,
        weights,
        grads,
        value=value,
        partials=partials,
        result=summed,
        statistics=statistics,
        rewards=rewards,
        finishes=finishes,
    )
    if partials is not None:
        call.combine(
            partials,
            weights,
            summed,
            stores_weights=a.want_weights and gradient != "unit",
            statistics=statistics,
            scores=record.contiguous(scores),
        )
    return outputs


def _set_to_0(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.zero_()


@planned
def kl_penalty_bwd(a: Arguments, record: Recording) -> tuple[Tensor | None, Tensor | None]:
    call = _TokensCall(a, record)
    grads: tuple[Tensor | None, Tensor | None] = record.outputs(empty_outputs("kl_penalty_bwd", a))
    if call.batch.sequences == 0:
        _set_to_0(*grads)
    elif call.batch.slots > 0:
        weights = record.contiguous(a.weights)
        call.read_tokens(call.result, weights, grads, grad_out=a.grad_out)
    return grads


def token_weights(*values: Any) -> Tensor:
    """The op of ``klfast.ops.schemas``: the gradient of values that are all 0."""
    like, *others, is_double = values
    dtype = torch.float64 if is_double else torch.float32
    zeros = torch.zeros((), dtype=dtype, device=like.device).expand(like.shape)
    weights: Tensor = kl_penalty_fwd(zeros, None, None, *others, None, False, True, False, False)[3]
    return weights.view(-1)


@planned
def scale_(a: Arguments, record: Recording) -> None:
    tensor = a.tensor
    size = tensor.numel()
    if size == 0:
        return
    aligned = size % 8 == 0 and tensor.data_ptr() % 16 == 0
    record.launch(
        kernels.scale_kernel,
        min(-(-size // _TILE), _SCALE_PROGRAMS),
        *(tensor, a.factor, size),
        ACC=ACC[arithmetic_dtype(tensor)],
        LAYOUT="aligned" if aligned else "unit",
        num_warps=4,
    )
