"""The ops: schemas, shapes for tracing, and a rule for vmap. Backends implement them, each in a
namespace of its own.

Choices are positions in lists: torch's conversion of a string argument to std::string leaks it
(torch 2.10 to 2.15), some 50 bytes a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.call import Choices
from klfast.dtypes import arithmetic_dtype
from klfast.layout import number_of_sequences
from klfast.logits.call import ENTROPIES
from klfast.reduction import RESULTS
from klfast.rollout.call import WEIGHTS, RolloutChoices, RuleBounds
from klfast.rollout.stats import rows_of_table
from klfast.stats import KLStats

_CALL = (
    "Tensor logprobs, Tensor? ref_logprobs, Tensor? old_logprobs, Tensor? mask, "
    "Tensor? cu_seqlens, Tensor? coef, Tensor? normalizer, int[] choices, float[] numbers, "
)
_INVERSE = "Tensor? inverse_temperature=None"
_TOKENS = "Tensor logits, Tensor token_ids, Tensor? keep, "
_TOKENS_BACKWARD = (
    "Tensor saved, Tensor logprobs, Tensor entropy, float temperature, Tensor? grad_logprobs, "
    f"Tensor? grad_entropy, {_INVERSE}"
)
_DIVERGENCE = (
    "Tensor logits, Tensor ref_logits, Tensor? token_ids, Tensor? keep, "
    "int divergence, float jsd_beta, float temperature, int entropy_of, "
)
SCHEMAS = {
    "token_logprobs_fwd": f"({_TOKENS}float temperature, bool want_entropy, {_INVERSE}) "
    "-> (Tensor, Tensor, Tensor)",
    "token_logprobs_bwd": f"({_TOKENS}{_TOKENS_BACKWARD}) -> Tensor",
    "token_logprobs_bwd_": f"({_TOKENS.replace('Tensor', 'Tensor(a!)', 1)}{_TOKENS_BACKWARD}) "
    "-> ()",
    "kl_divergence_fwd": f"({_DIVERGENCE}Tensor? row_weights, bool want_grad, bool want_grad_ref, "
    f"{_INVERSE}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "kl_divergence_bwd": f"({_DIVERGENCE}Tensor rows, Tensor saved, Tensor? entropy, "
    "Tensor? grad_rows, Tensor? grad_logprobs, Tensor? grad_ref_logprobs, Tensor? grad_entropy, "
    f"bool want_grad, bool want_grad_ref, {_INVERSE}) "
    "-> (Tensor, Tensor)",
    "kl_penalty_fwd": f"({_CALL}Tensor? scores, bool want_weights, bool want_grad_logprobs, "
    "bool want_grad_ref_logprobs, bool want_statistics) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "kl_penalty_bwd": f"({_CALL}Tensor grad_out, Tensor weights, bool want_grad_logprobs, "
    "bool want_grad_ref_logprobs) -> (Tensor, Tensor)",
    "token_weights": "(Tensor like, Tensor? mask, Tensor? cu_seqlens, Tensor? coef, "
    "Tensor? normalizer, int[] choices, float[] numbers, bool is_double) -> Tensor",
    "scale_": "(Tensor(a!) tensor, Tensor factor) -> ()",
    "rollout_correction": "(Tensor logprobs, Tensor rollout_logprobs, Tensor? mask, "
    "Tensor? cu_seqlens, Tensor? advantages, int[] choices, float[] numbers, int[] rules, "
    "float[] bounds) -> (Tensor, Tensor, Tensor)",
}
"""Name -> signature. What is not wanted has the shape [0].

``kl_penalty_fwd`` returns result, weights ([S], of each sequence's tokens in the result: all that
the backward needs), statistics ([8, S], in the order of
``KLStats``) and the gradients of a scalar result. Without ``ref_logprobs``, ``logprobs`` holds the
log-ratio. ``token_weights`` returns by how much a scalar reduction of values, in the shape of
``like``, grows with each of them ([N], fp32 or fp64). ``token_logprobs_fwd`` returns logprobs,
entropy, saved ([2, R]); ``kl_divergence_fwd`` rows, logprobs, ref_logprobs, saved ([5, R]), the
gradients of sum(row_weights * rows), and the entropies of the model that ``entropy_of`` says, a
position in ``klfast.logits.call.ENTROPIES``: never the second of a JSD, nor beside gradients. A
gradient that comes in as None stands for zeros. ``token_ids`` is [R], or, for ``token_logprobs``,
[R, K] too; logprobs and their gradient are as many numbers, and an id of ``NO_ID`` is none.
``inverse_temperature``, float64, takes the place of the temperature: one a row, [R], or a 0-dim
tensor.
``rollout_correction`` returns weights, the mask and the table of ``RolloutStats``; ``rules`` and
``bounds`` hold three integers and two numbers a rule (``klfast.rollout.call``).
"""


class Ops(NamedTuple):
    """The ops of a namespace."""

    kl_penalty_fwd: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    kl_penalty_bwd: Callable[..., tuple[Tensor, Tensor]]
    token_logprobs_fwd: Callable[..., tuple[Tensor, Tensor, Tensor]]
    token_logprobs_bwd: Callable[..., Tensor]
    token_logprobs_bwd_: Callable[..., None]
    kl_divergence_fwd: Callable[..., tuple[Tensor, ...]]
    kl_divergence_bwd: Callable[..., tuple[Tensor, Tensor]]
    token_weights: Callable[..., Tensor]
    scale_: Callable[[Tensor, Tensor], None]
    rollout_correction: Callable[..., tuple[Tensor, Tensor, Tensor]] | None
    """None in a namespace that was defined without it."""

    @classmethod
    def of(cls, namespace: str) -> Ops:
        """Those of ``torch.ops.<namespace>``."""
        ops = getattr(torch.ops, namespace)
        there = {name: getattr(ops, name).default for name in _DEFINED[namespace]}
        return cls(**({"rollout_correction": None} | there))


def _empty_gradient(tensor: Tensor | None, wanted: bool, like: Tensor) -> Tensor:
    tensor = like if tensor is None else tensor
    return tensor.new_empty(tensor.shape if wanted else (0,))


def _kl_penalty_fwd(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    old_logprobs: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    coef: Tensor | None,
    normalizer: Tensor | None,
    choices: list[int],
    numbers: list[float],
    scores: Tensor | None,
    want_weights: bool,
    want_grad_logprobs: bool,
    want_grad_ref_logprobs: bool,
    want_statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = arithmetic_dtype(logprobs, ref_logprobs, old_logprobs)
    sequences = number_of_sequences(logprobs, cu_seqlens)
    shapes = {"token": logprobs.shape, "sequence": (sequences,), "scalar": ()}
    statistics = (len(KLStats._fields), sequences) if want_statistics else (0,)
    return (
        logprobs.new_empty(shapes[RESULTS[Choices(*choices).result]], dtype=dtype),
        logprobs.new_empty((sequences if want_weights else 0,), dtype=dtype),
        logprobs.new_empty(statistics, dtype=dtype),
        _empty_gradient(logprobs, want_grad_logprobs, logprobs),
        _empty_gradient(ref_logprobs, want_grad_ref_logprobs, logprobs),
    )


def _kl_penalty_bwd(
    logprobs: Tensor, ref_logprobs: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    *_, want_grad_logprobs, want_grad_ref_logprobs = others
    return (
        _empty_gradient(logprobs, want_grad_logprobs, logprobs),
        _empty_gradient(ref_logprobs, want_grad_ref_logprobs, logprobs),
    )


def _token_weights(like: Tensor, *others: Any) -> Tensor:
    is_double = others[-1]
    return like.new_empty((like.numel(),), dtype=torch.float64 if is_double else torch.float32)


def _nothing(*_: Any) -> None:
    pass


def _token_logprobs_fwd(
    logits: Tensor,
    token_ids: Tensor,
    keep: Tensor | None,
    temperature: float,
    want_entropy: bool,
    inverse_temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0] * logits.shape[1]
    results = logits.new_empty((rows,), dtype=arithmetic_dtype(logits))
    entropy = results.new_empty((rows if want_entropy else 0,))
    logprobs = results.new_empty((token_ids.numel(),))
    return logprobs, entropy, results.new_empty((2, rows), dtype=torch.float64)


def _token_logprobs_bwd(logits: Tensor, *_: Any) -> Tensor:
    return _empty_gradient(logits, True, logits)


def _kl_divergence_fwd(
    logits: Tensor,
    ref_logits: Tensor,
    token_ids: Tensor | None,
    keep: Tensor | None,
    divergence: int,
    jsd_beta: float,
    temperature: float,
    entropy_of: int,
    row_weights: Tensor | None,
    want_grad: bool,
    want_grad_ref: bool,
    inverse_temperature: Tensor | None = None,
) -> tuple[Tensor, ...]:
    rows = logits.shape[0] * logits.shape[1]
    results = logits.new_empty((rows,), dtype=arithmetic_dtype(logits, ref_logits))
    taken = (0 if token_ids is None else rows,)
    return (
        results,
        results.new_empty(taken),
        results.new_empty(taken),
        results.new_empty((5, rows), dtype=torch.float64),
        _empty_gradient(logits, want_grad, logits),
        _empty_gradient(ref_logits, want_grad_ref, logits),
        results.new_empty((0 if ENTROPIES[entropy_of] == "none" else rows,)),
    )


def _kl_divergence_bwd(
    logits: Tensor,
    ref_logits: Tensor,
    token_ids: Tensor | None,
    keep: Tensor | None,
    divergence: int,
    jsd_beta: float,
    temperature: float,
    entropy_of: int,
    rows: Tensor,
    saved: Tensor,
    entropy: Tensor | None,
    grad_rows: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_ref_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    want_grad: bool,
    want_grad_ref: bool,
    inverse_temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _empty_gradient(logits, want_grad, logits), _empty_gradient(
        ref_logits, want_grad_ref, logits
    )


def _rollout_correction(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    advantages: Tensor | None,
    choices: list[int],
    numbers: list[float],
    rules: list[int],
    bounds: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = arithmetic_dtype(logprobs, rollout_logprobs)
    weighs = WEIGHTS[RolloutChoices(*choices).weight] != "none"
    rows = rows_of_table(len(bounds) // len(RuleBounds._fields))
    return (
        logprobs.new_empty(logprobs.shape if weighs else (0,), dtype=dtype),
        logprobs.new_empty(logprobs.shape, dtype=torch.bool if mask is None else mask.dtype),
        logprobs.new_empty((rows, number_of_sequences(logprobs, cu_seqlens)), dtype=dtype),
    )


_FAKES: dict[str, Callable[..., Any]] = {
    "kl_penalty_fwd": _kl_penalty_fwd,
    "kl_penalty_bwd": _kl_penalty_bwd,
    "token_logprobs_fwd": _token_logprobs_fwd,
    "token_logprobs_bwd": _token_logprobs_bwd,
    "token_logprobs_bwd_": _nothing,
    "kl_divergence_fwd": _kl_divergence_fwd,
    "kl_divergence_bwd": _kl_divergence_bwd,
    "token_weights": _token_weights,
    "scale_": _nothing,
    "rollout_correction": _rollout_correction,
}


def _empty_batch(op: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """The outputs of vmap over no element, whose shapes come from an element of zeros."""
    element = [
        arg.new_zeros(arg.movedim(dim, 0).shape[1:]) if isinstance(dim, int) else arg
        for arg, dim in zip(args, in_dims, strict=True)
    ]
    return _stacked([op(*element)], lambda outputs: outputs[0].new_empty((0, *outputs[0].shape)))


def _stacked(
    of_elements: list[Any], stack: Callable[[tuple[Tensor, ...]], Tensor] = torch.stack
) -> Any:
    """The outputs of a call per element, and where their new dimension is, as vmap rules return."""
    if isinstance(of_elements[0], Tensor):
        return stack(tuple(of_elements)), 0
    outputs = tuple(stack(output) for output in zip(*of_elements, strict=True))
    return outputs, (0,) * len(outputs)


def _vmap_by_element(op: Any) -> Any:
    """Vmap by one call per element: right for every option, and fast where elements are large."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        def element(i: int) -> list[Any]:
            return [
                arg.select(dim, i) if isinstance(dim, int) else arg
                for arg, dim in zip(args, in_dims, strict=True)
            ]

        if info.batch_size == 0:
            return _empty_batch(op, in_dims, args)
        return _stacked([op(*element(i)) for i in range(info.batch_size)])

    return vmap


_LIBRARIES: list[torch.library.Library] = []
_DEFINED: dict[str, tuple[str, ...]] = {}
"""The ops of each namespace."""


def define(namespace: str, names: Iterable[str] = SCHEMAS) -> torch.library.Library:
    """Define the ops in a namespace, for the life of the process: all, or those that are named."""
    _DEFINED[namespace] = tuple(names)
    library = torch.library.Library(namespace, "DEF")
    for name in _DEFINED[namespace]:
        library.define(name + SCHEMAS[name])
        torch.library.register_fake(f"{namespace}::{name}", _FAKES[name], lib=library)
        if not name.endswith("_"):  # which changes a tensor that no transform sees
            op = getattr(getattr(torch.ops, namespace), name).default
            torch.library.register_vmap(op, _vmap_by_element(op), lib=library)
    _LIBRARIES.append(library)
    return library
