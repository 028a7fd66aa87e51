"""The ops: schemas, shapes for tracing, and a vmap rule. Each backend implements them in its own
namespace.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.args.penalty import Choices
from klfast.args.rollout import WEIGHTS, RolloutChoices, RuleBounds
from klfast.args.rows import ENTROPIES
from klfast.formulas.sequences import number_of_sequences
from klfast.stats.kl import KLStats
from klfast.stats.rollout import rows_of_table
from klfast.types.dtypes import arithmetic_dtype, picks_dtype
from klfast.types.reduction import RESULTS

# How many numbers per row the forwards over logits save for a backward: WordSaved and Saved in
# csrc/logits/call.h.
SAVED_OF_TOKENS, SAVED_OF_PAIRS = 2, 5

# Choices are positions in lists, because torch's conversion of a string argument to std::string
# leaks some 50 bytes per call (torch 2.10 to 2.15).
_CALL = (
    "Tensor logprobs, Tensor? ref_logprobs, Tensor? old_logprobs, Tensor? mask, "
    "Tensor? weighting, Tensor? cu_seqlens, Tensor? coef, Tensor? normalizer, "
    "int[] choices, float[] numbers, "
)
_INVERSE = "Tensor? inverse_temperature=None"
_GRAD_LSES = ", Tensor? grad_lse=None, Tensor? grad_ref_lse=None"
_TOKENS = "Tensor logits, Tensor token_ids, Tensor? keep, "
_TOKENS_BACKWARD = (
    "Tensor saved, Tensor logprobs, Tensor entropy, float temperature, Tensor? grad_logprobs, "
    f"Tensor? grad_entropy, {_INVERSE}, Tensor? grad_lse=None"
)
_DIVERGENCE = (
    "Tensor logits, Tensor ref_logits, Tensor? token_ids, Tensor? keep, "
    "int divergence, float parameter, float temperature, int entropy_of, "
)
_INPLACE_DIVERGENCE = (
    "Tensor(a!) logits, Tensor(b!) ref_logits, Tensor? keep, "
    "int divergence, float parameter, float temperature, "
)
# A forward's output that is not wanted has the shape [0], because torch.jit and AOTInductor do not
# support None. A backward's gradient that is not wanted is None, and an incoming gradient of None
# means zeros. saved holds the rows' log-sum-exps (klfast.autograd.lse). grad_lse and grad_ref_lse
# are the gradients of the log-sum-exps under either model, which are not 0 if a row is a shard of a
# vocabulary. inverse_temperature, float64, replaces the temperature: one per row, [R], or 0-dim.
SCHEMAS = {
    # logprobs, entropy, saved ([SAVED_OF_TOKENS, R]). Ids are [R] or [R, K], like the log-probs and
    # their gradient, and NO_ID marks a missing one. With [R, K] these and grad_lse are float64: the
    # rounding of several log-probs in fp32 would leave no digit of 1 minus their probability.
    "token_logprobs_fwd": f"({_TOKENS}float temperature, bool want_entropy, {_INVERSE}) "
    "-> (Tensor, Tensor, Tensor)",
    "token_logprobs_bwd": f"({_TOKENS}{_TOKENS_BACKWARD}) -> Tensor",
    "token_logprobs_bwd_": f"({_TOKENS.replace('Tensor', 'Tensor(a!)', 1)}{_TOKENS_BACKWARD}) "
    "-> ()",
    # rows, logprobs, ref_logprobs, saved ([SAVED_OF_PAIRS, R]), the gradients of
    # sum(row_weights * rows), and entropies, which never come with gradients. divergence is a
    # position in klfast.formulas.divergences.DIVERGENCES, and parameter the row's. entropy_of, a
    # position in klfast.args.rows.ENTROPIES, is the second model only for kl and skew.
    "kl_divergence_fwd": f"({_DIVERGENCE}Tensor? row_weights, bool want_grad, bool want_grad_ref, "
    f"{_INVERSE}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # rows and saved. This op and kl_divergence_bwd_ leave gradients in the memory of the logits,
    # which are contiguous, and different tensors.
    "kl_divergence_fwd_": f"({_INPLACE_DIVERGENCE}Tensor row_weights, bool want_grad, "
    f"bool want_grad_ref, {_INVERSE}) -> (Tensor, Tensor)",
    "kl_divergence_bwd": f"({_DIVERGENCE}Tensor rows, Tensor saved, Tensor? entropy, "
    "Tensor? grad_rows, Tensor? grad_logprobs, Tensor? grad_ref_logprobs, Tensor? grad_entropy, "
    f"bool want_grad, bool want_grad_ref, {_INVERSE}{_GRAD_LSES}) -> (Tensor, Tensor)",
    "kl_divergence_bwd_": f"({_INPLACE_DIVERGENCE}Tensor rows, Tensor saved, Tensor grad_rows, "
    f"bool want_grad, bool want_grad_ref, {_INVERSE}{_GRAD_LSES}) -> ()",
    # Result, weights, statistics ([8, S], in the order of KLStats), gradients of a scalar result.
    # The weights, [S], are the weights of each sequence's tokens in the result, and are all that
    # the backward needs. Without ref_logprobs, logprobs holds the log-ratio. weighting is the
    # weights= of a public call, in the shape of logprobs or [S, 1].
    "kl_penalty_fwd": f"({_CALL}Tensor? scores, bool want_weights, bool want_grad_logprobs, "
    "bool want_grad_ref_logprobs, bool want_statistics) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "kl_penalty_bwd": f"({_CALL}Tensor grad_out, Tensor weights, bool want_grad_logprobs, "
    "bool want_grad_ref_logprobs) -> (Tensor, Tensor)",
    # The derivative of a scalar reduction by each of its values, which have the shape of like, [N].
    "token_weights": "(Tensor like, Tensor? mask, Tensor? weighting, Tensor? cu_seqlens, "
    "Tensor? coef, Tensor? normalizer, int[] choices, float[] numbers, bool is_double) -> Tensor",
    "scale_": "(Tensor(a!) tensor, Tensor factor) -> ()",
    # Weights, the mask and the table of RolloutStats. rules and bounds hold three integers and two
    # numbers for each rule (klfast.args.rollout).
    "rollout_correction": "(Tensor logprobs, Tensor rollout_logprobs, Tensor? mask, "
    "Tensor? cu_seqlens, Tensor? advantages, int[] choices, float[] numbers, int[] rules, "
    "float[] bounds) -> (Tensor, Tensor, Tensor)",
}
"""Name -> signature."""


PenaltyOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Result, weights, statistics, and the unit gradients of two inputs."""


class Ops(NamedTuple):
    """The ops of a namespace that every backend of ops implements."""

    kl_penalty_fwd: Callable[..., PenaltyOutputs]
    kl_penalty_bwd: Callable[..., tuple[Tensor | None, Tensor | None]]
    token_logprobs_fwd: Callable[..., tuple[Tensor, Tensor, Tensor]]
    token_logprobs_bwd: Callable[..., Tensor]
    token_logprobs_bwd_: Callable[..., None]
    kl_divergence_fwd: Callable[..., tuple[Any, ...]]
    kl_divergence_fwd_: Callable[..., tuple[Tensor, Tensor]]
    kl_divergence_bwd: Callable[..., tuple[Tensor | None, ...]]
    kl_divergence_bwd_: Callable[..., None]
    token_weights: Callable[..., Tensor]
    scale_: Callable[[Tensor, Tensor], None]

    @classmethod
    def of(cls, namespace: str) -> Ops:
        """The ops of ``torch.ops.<namespace>``."""
        ops = getattr(torch.ops, namespace)
        return cls(*(getattr(ops, name).default for name in cls._fields))


class Arguments(SimpleNamespace):
    """The arguments of an op's call, by the names of its schema; None for omitted arguments."""

    @classmethod
    def of(cls, op: str, values: Iterable[Any]) -> Arguments:
        # torch leaves out trailing arguments that have their default.
        return cls(**dict(itertools.zip_longest(NAMES[op], values)))


NAMES = {
    op: re.findall(r"(\w+)(?:=None)?[,)]", schema.partition(" -> ")[0])
    for op, schema in SCHEMAS.items()
}
"""The names of each op's arguments."""


def or_empty(result: Tensor, *outputs: Tensor | None) -> tuple[Tensor, ...]:
    """A forward's outputs, with [0] in place of None."""
    return tuple(result.new_empty((0,)) if output is None else output for output in outputs)


def _gradients(*pairs: tuple[Tensor, bool]) -> tuple[Tensor | None, ...]:
    return tuple(tensor.new_empty(tensor.shape) if wanted else None for tensor, wanted in pairs)


def _gradients_of_penalty(a: Arguments) -> tuple[Tensor | None, ...]:
    return _gradients(
        (a.logprobs, a.want_grad_logprobs), (a.ref_logprobs, a.want_grad_ref_logprobs)
    )


def _kl_penalty_fwd(a: Arguments) -> tuple[Tensor, ...]:
    dtype = arithmetic_dtype(a.logprobs, a.ref_logprobs, a.old_logprobs)
    sequences = number_of_sequences(a.logprobs, a.cu_seqlens)
    shapes = {"token": a.logprobs.shape, "sequence": (sequences,), "scalar": ()}
    result = a.logprobs.new_empty(shapes[RESULTS[Choices(*a.choices).result]], dtype=dtype)
    return (
        result,
        result.new_empty((sequences if a.want_weights else 0,)),
        result.new_empty((len(KLStats._fields), sequences) if a.want_statistics else (0,)),
        *or_empty(result, *_gradients_of_penalty(a)),
    )


def _token_logprobs_fwd(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    rows = a.logits.shape[0] * a.logits.shape[1]
    results = a.logits.new_empty((rows,), dtype=arithmetic_dtype(a.logits))
    entropy = results.new_empty((rows if a.want_entropy else 0,))
    logprobs = results.new_empty(
        (a.token_ids.numel(),), dtype=picks_dtype(a.token_ids, arithmetic_dtype(a.logits))
    )
    return logprobs, entropy, results.new_empty((SAVED_OF_TOKENS, rows), dtype=torch.float64)


def _gradients_of_divergence(a: Arguments) -> tuple[Tensor | None, ...]:
    return _gradients((a.logits, a.want_grad), (a.ref_logits, a.want_grad_ref))


def _kl_divergence_fwd(a: Arguments) -> tuple[Tensor, ...]:
    results, saved = _kl_divergence_fwd_(a)
    rows = results.numel()
    taken = (0 if a.token_ids is None else rows,)
    return (
        results,
        results.new_empty(taken),
        results.new_empty(taken),
        saved,
        *or_empty(results, *_gradients_of_divergence(a)),
        results.new_empty((0 if ENTROPIES[a.entropy_of] == "none" else rows,)),
    )


def _kl_divergence_fwd_(a: Arguments) -> tuple[Tensor, Tensor]:
    rows = a.logits.shape[0] * a.logits.shape[1]
    results = a.logits.new_empty((rows,), dtype=arithmetic_dtype(a.logits, a.ref_logits))
    return results, results.new_empty((SAVED_OF_PAIRS, rows), dtype=torch.float64)


def _rollout_correction(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    like, dtype = a.logprobs, arithmetic_dtype(a.logprobs, a.rollout_logprobs)
    weighs = WEIGHTS[RolloutChoices(*a.choices).weight] != "none"
    rows = rows_of_table(len(a.bounds) // len(RuleBounds._fields))
    return (
        like.new_empty(like.shape if weighs else (0,), dtype=dtype),
        like.new_empty(like.shape, dtype=torch.bool if a.mask is None else a.mask.dtype),
        like.new_empty((rows, number_of_sequences(like, a.cu_seqlens)), dtype=dtype),
    )


_FAKES: dict[str, Callable[[Arguments], Any]] = {
    "kl_penalty_fwd": _kl_penalty_fwd,
    "kl_penalty_bwd": _gradients_of_penalty,
    "token_logprobs_fwd": _token_logprobs_fwd,
    "token_logprobs_bwd": lambda a: a.logits.new_empty(a.logits.shape),
    "token_logprobs_bwd_": lambda a: None,
    "kl_divergence_fwd": _kl_divergence_fwd,
    "kl_divergence_fwd_": _kl_divergence_fwd_,
    "kl_divergence_bwd": _gradients_of_divergence,
    "kl_divergence_bwd_": lambda a: None,
    "token_weights": lambda a: a.like.new_empty(
        (a.like.numel(),), dtype=torch.float64 if a.is_double else torch.float32
    ),
    "scale_": lambda a: None,
    "rollout_correction": _rollout_correction,
}


def empty_outputs(op: str, a: Arguments) -> Any:
    """The outputs of an op, before anything is written into them."""
    return _FAKES[op](a)


def _fake(op: str, *values: Any) -> Any:
    return empty_outputs(op, Arguments.of(op, values))


def _stacked(
    of_elements: list[Any], stack: Callable[[tuple[Tensor, ...]], Tensor] = torch.stack
) -> Any:
    """The outputs of one call per element and their new dimension, as vmap rules return them."""
    if isinstance(of_elements[0], Tensor):
        return stack(tuple(of_elements)), 0
    outputs = tuple(
        None if output[0] is None else stack(output) for output in zip(*of_elements, strict=True)
    )
    return outputs, tuple(None if output is None else 0 for output in outputs)


def _vmap_by_element(op: Any) -> Any:
    """Vmap by one call per element: right for every option, and fast if elements are large."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        def outputs_of(part: Callable[[Tensor, int], Tensor]) -> Any:
            pairs = zip(args, in_dims, strict=True)
            return op(*(part(arg, dim) if isinstance(dim, int) else arg for arg, dim in pairs))

        if info.batch_size > 0:
            elements = [partial(torch.select, index=i) for i in range(info.batch_size)]
            return _stacked([outputs_of(element) for element in elements])
        # There is no element. The shapes of the outputs come from one of zeros.
        zeros = outputs_of(lambda arg, dim: arg.new_zeros(arg.movedim(dim, 0).shape[1:]))
        return _stacked([zeros], lambda outputs: outputs[0].new_empty((0, *outputs[0].shape)))

    return vmap


# torch removes the ops of a library that is no longer referenced.
_LIBRARIES: list[torch.library.Library] = []


def define(namespace: str, names: Iterable[str] = SCHEMAS) -> torch.library.Library:
    """Define all or the named ops in a namespace, for the life of the process."""
    library = torch.library.Library(namespace, "DEF")
    for name in names:
        library.define(name + SCHEMAS[name])
        torch.library.register_fake(f"{namespace}::{name}", partial(_fake, name), lib=library)
        if not name.endswith("_"):  # in-place ops change a tensor that no transform sees
            op = getattr(getattr(torch.ops, namespace), name).default
            torch.library.register_vmap(op, _vmap_by_element(op), lib=library)
    _LIBRARIES.append(library)
    return library
