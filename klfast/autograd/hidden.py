"""The Functions over hidden states, the same for every compiled backend.

============================== ============== ======================================================
differentiated outputs         matmuls        method
============================== ============== ======================================================
only a scalar of divergences   2 + 2 per      the forward computes the gradient of the unscaled
or of a caller's losses        model          scalar
per-token values, all heads    2 + 1 for each the forward stores each value's gradient, a vector [D]
frozen                         kind           per token, which the backward scales
per-token values               2 + 2 + 2 per  the backward computes each chunk's logits again
                               model
============================== ============== ======================================================

Matmuls for a model without gradient and for a frozen weight are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klfast.args.heads import Hidden
from klfast.args.rows import Rows, RowsArgs
from klfast.autograd import context
from klfast.autograd.chunks import ChunkOfModel, Gradients
from klfast.autograd.context import Grads
from klfast.autograd.frozen_head import HiddenGradients, store
from klfast.autograd.hidden_rows import Found, RowOps
from klfast.autograd.penalty import RowReducer
from klfast.ops.schemas import Ops
from klfast.stats.kl import KLStats

_NAMES = ("hidden", "weight", "bias"), ("ref_hidden", "ref_weight", "ref_bias")
"""The tensors of the policy and of the reference, by their names in the public functions."""
TENSORS = 3  # the number of a model's tensors that may carry a graph: hidden states, weight, bias
_CONSTANT = (None, None, None)
"""The gradients of the call, its source and the ops, which the Functions take last."""


def is_one_read(args: RowsArgs) -> bool:
    """True if the forward computes the gradient, as only a scalar sends one back."""
    is_scalar = args.loss is not None or (
        args.divergence is not None
        and args.reduced is not None
        and args.reduced.spec.reduction.result == "scalar"
        and args.token_ids is None
        and args.return_entropy in (False, "detached")
    )
    return is_scalar and context.may_need_gradient(*args.source.tensors)


def one_read(
    args: RowsArgs, source: Hidden, ops: Ops
) -> tuple[Tensor, KLStats | None, Tensor | None, Tensor | None]:
    """A scalar whose gradient the forward computes, its statistics, log-probs and entropies."""
    _refuse_transforms(args)
    result, logprobs, entropy, *stats = _Scalar.apply(*source.tensors, *_emptied(args, source), ops)
    return result, KLStats(*stats) if stats else None, logprobs, entropy


def rows_of(args: RowsArgs, source: Hidden, ops: Ops) -> Rows:
    """The requested values of each token, differentiable once."""
    _refuse_transforms(args)
    if not context.may_need_gradient(*source.tensors):
        return _computed(RowOps(args, source, ops)).rows(args)
    heads = [t for _, head in source.models() for t in (head.weight, head.bias)]
    is_frozen = not any(t is not None and t.requires_grad for t in heads)
    function = _FrozenHead if is_frozen else _Recomputed
    return Rows(*function.apply(*source.tensors, *_emptied(args, source), ops))


def _refuse_transforms(args: RowsArgs) -> None:
    if torch._C._are_functorch_transforms_active() or context.is_forward_mode():
        raise RuntimeError(
            f"klfast.{args.function} needs backend='reference' under torch.func transforms and in "
            "forward mode"
        )


def _refuse_batches(args: RowsArgs, sent: Rows) -> None:
    """Raise for many gradients at once: chunks share memory, and ranks add up in place."""
    if any(grad is not None and context.is_batched(grad) for grad in sent):
        raise RuntimeError(
            f"klfast.{args.function} needs backend='reference' for a backward of many grad_outputs "
            "at once (is_grads_batched=True, or vectorize=True)"
        )


def _emptied(args: RowsArgs, source: Hidden) -> tuple[RowsArgs, Hidden]:
    """The call and its source without tensors, which would stay alive in the graph."""
    source = source._replace(tensors=())
    return args._replace(source=source), source


def _names(args: RowsArgs, source: Hidden) -> tuple[str, ...]:
    """The names of ``source.tensors``."""
    if len(source.softcaps) == 1:
        return _NAMES[0]
    first, second = _NAMES[::-1] if args.policy else _NAMES
    return (*first, *second)


def _without_autocast(args: RowsArgs) -> torch.autocast:
    """Autocast, off: the call has already converted its tensors to autocast's dtype."""
    return torch.autocast(args.device.type, enabled=False)


def _computed(kernels: RowOps) -> Found:
    """The outputs of all tokens, without a graph."""
    args, found = kernels.args, kernels.empty()
    with _without_autocast(args):
        for own in kernels.chunks():
            kernels.compute_tokens(own, found)
            if found.kl is not None:
                kernels.values(own, found.tokens[args.policy], found.kl, found.kl_saved)
    return found


def _needs(ctx: Any, source: Hidden) -> list[Sequence[bool]]:
    """Which tensors of each model need a gradient."""
    places = range(0, TENSORS * len(source.softcaps), TENSORS)
    return [ctx.needs_input_grad[at : at + TENSORS] for at in places]


def _outputs_of(model: int, args: RowsArgs, rows: Rows) -> tuple[Tensor | None, Tensor | None]:
    """The log-probs of one model among all outputs, and its entropies."""
    logprobs = rows.second_logprobs if model == 1 else rows.logprobs
    return logprobs, rows.entropy if model == args.policy else None


def _mark_constant(ctx: Any, args: RowsArgs, rows: Rows, wants: Sequence[bool]) -> None:
    """Mark the outputs of models whose logits need no gradient."""
    constant = [t for m, want in enumerate(wants) if not want for t in _outputs_of(m, args, rows)]
    ctx.mark_non_differentiable(*(t for t in constant if t is not None))
    ctx.set_materialize_grads(False)


class _Sums:
    """The gradients of all models."""

    def __init__(self, kernels: RowOps, needs: Sequence[Sequence[bool]]) -> None:
        args = kernels.args
        both = zip(kernels.models, needs, strict=True)
        self._args, self._acting = args, args.acting()
        self._of = [Gradients(model, own, args.dtype) for model, own in both]
        self.wants = [any(own) for own in needs]
        """For each model, True if the gradient of its logits is needed."""

    def add(self, own: Sequence[ChunkOfModel], grads: Grads) -> None:
        """Add the contributions of a chunk's gradients of logits; None for unwanted gradients."""
        for of, model, grad in zip(self._of, own, grads, strict=True):
            if grad is not None:
                of.add(model, grad, self._acting)

    def tensors(self) -> list[Tensor | None]:
        """The gradients of all models, after the last chunk."""
        for of in self._of:
            # Each rank's gradient is from its shard of the vocabulary.
            if of.hidden is not None and self._args.shards is not None:
                self._args.shards.ranks.add_up(of.hidden)
        return [tensor for of in self._of for tensor in of.tensors()]


class _Scalar(torch.autograd.Function):
    """A scalar of divergences or losses, whose gradient the forward computes."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        *tensors, args, source, ops = inputs
        source = source._replace(tensors=tuple(tensors))
        kernels = RowOps(args, source, ops)
        values = kernels.zeros()
        reducer = RowReducer(args.reduction_call(values), ops)
        # These do not depend on the values, so that a chunk's gradient needs no other chunk.
        weights = reducer.weights(args.dtype)
        sums = _Sums(kernels, _needs(ctx, source))
        want_entropy = bool(args.return_entropy)
        policy = kernels.empty_tokens(want_entropy)
        with _without_autocast(args):
            for own in kernels.chunks():
                if policy is not None:
                    kernels.compute_model(own[args.policy], policy, want_entropy)
                of_chunk = own[0].chunk.of(weights)
                sums.add(own, kernels.values(own, policy, values, [], of_chunk, sums.wants))
        # The scalar comes last, because it needs the values of all chunks.
        result, stats = reducer.reduce(values)
        ctx.ops, ctx.function, ctx.is_fresh = ops, args.function, True
        # So a second derivative raises, as the gradients depend on the tensors.
        context.save(ctx, (*tensors, *sums.tensors()), _names(args, source))
        logprobs = None if policy is None or args.loss is None else policy.logprobs
        entropy = policy.entropy if policy is not None and want_entropy else None
        others = (logprobs, entropy, *(stats or ()))
        ctx.mark_non_differentiable(*(t for t in others if t is not None))
        ctx.set_materialize_grads(False)
        return (result, *others)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        tensors = len(ctx.needs_input_grad) - 3
        if grad_out is None:
            return (None,) * (tensors + 3)
        # Only the saved gradients are read. So a head that ZeRO-3 has freed by now is no error.
        saved = context.saved(ctx, are_read=False)
        inputs, grads = saved[:tensors], _scaled(ctx, saved[tensors:], grad_out)
        return (*context.guarded(_in_dtypes_of(grads, inputs), *inputs, grad_out), *_CONSTANT)


def _scaled(ctx: Any, grads: Grads, grad_out: Tensor) -> Grads:
    """The unit gradients times ``grad_out``, in place in the last backward of a graph."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return [None if grad is None else grad * grad_out for grad in grads]
    is_taken = not context.is_batched(grad_out) and context.take(ctx, "is_fresh") is None
    if is_taken:  # by another thread
        raise RuntimeError(
            f"klfast.{ctx.function} allows one backward without retain_graph=True, got another"
        )
    return context.scaled(grads, grad_out, ctx.ops)


def _in_dtypes_of(grads: Grads, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    both = zip(grads, tensors, strict=True)
    return [None if g is None or t is None else g.to(t.dtype) for g, t in both]


class _Recomputed(torch.autograd.Function):
    """Per-token values. The backward computes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Rows:
        *tensors, args, source, ops = inputs
        source = source._replace(tensors=tuple(tensors))
        found = _computed(RowOps(args, source, ops))
        context.save_all(ctx, (tensors, found, inputs[-3:]), _names(args, source))
        rows = found.rows(args)
        _mark_constant(ctx, args, rows, [any(own) for own in _needs(ctx, source)])
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        incoming = Rows(*grads)
        tensors, found, (args, source, ops) = context.saved_all(ctx)
        _refuse_batches(args, incoming)
        kernels = RowOps(args, source._replace(tensors=tuple(tensors)), ops)
        with torch.no_grad(), _without_autocast(args):
            sums = _Sums(kernels, _needs(ctx, source))
            if any(grad is not None for grad in incoming):
                for own in kernels.chunks():
                    sums.add(own, _chunk_gradients(kernels, own, found, incoming, sums.wants))
            sent = _in_dtypes_of(sums.tensors(), tensors)
        return (*context.guarded(sent, *tensors, *incoming), *_CONSTANT)


def _chunk_gradients(
    kernels: RowOps,
    own: Sequence[ChunkOfModel],
    found: Found,
    incoming: Rows,
    wants: Sequence[bool],
) -> Grads:
    """The gradients of a chunk's logits, which may overwrite the logits."""
    chunk = own[0].chunk
    grads: list[Tensor | None] = [None] * len(own)
    for m, (model, tokens) in enumerate(zip(own, found.tokens, strict=True)):
        sent = [None if g is None else g[chunk.at] for g in _outputs_of(m, kernels.args, incoming)]
        if wants[m] and tokens is not None and any(g is not None for g in sent):
            in_place = incoming.kl is None and model.head.softcap is None
            grads[m] = kernels.token_gradient(model, tokens, *sent, in_place=in_place)
    if incoming.kl is None:
        return grads
    of_kl = kernels.divergence_gradients(own, found, incoming.kl, wants)
    pairs = zip(grads, of_kl, strict=True)
    return [g if k is None else k if g is None else k.add_(g) for g, k in pairs]


class _FrozenHead(torch.autograd.Function):
    """Per-token values under frozen heads, whose gradients the forward stores as vectors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Rows:
        *tensors, args, source, ops = inputs
        source = source._replace(tensors=tuple(tensors))
        kernels = RowOps(args, source, ops)
        found, wants = kernels.empty(), [own[0] for own in _needs(ctx, source)]
        vectors = [
            HiddenGradients.zeros(args, model.hidden, own, found.kl is not None) if want else None
            for model, own, want in zip(kernels.models, found.tokens, wants, strict=True)
        ]
        with _without_autocast(args):
            for own in kernels.chunks():
                kernels.compute_tokens(own, found)
                for model, of_model, tokens in zip(own, vectors, found.tokens, strict=True):
                    if of_model is not None and tokens is not None:
                        of_model.add_tokens(kernels, model, tokens)
                if found.kl is None:
                    continue
                ones = found.kl.new_ones(own[0].chunk.tokens)
                of_kl = kernels.divergences(own, found.kl, found.kl_saved, ones, wants)
                for model, of_model, grad in zip(own, vectors, of_kl, strict=True):
                    if of_model is not None and of_model.of_kl is not None and grad is not None:
                        store(of_model.of_kl, model, grad)
        # The backward reads the weight rows of the token ids.
        logprobs = [None if own is None else own.logprobs for own in found.tokens]
        context.save_all(ctx, (tensors, logprobs, vectors, inputs[-3:-1]), _names(args, source))
        rows = found.rows(args)
        _mark_constant(ctx, args, rows, wants)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        incoming = Rows(*grads)
        picks = incoming.logprobs is not None or incoming.second_logprobs is not None
        tensors, logprobs, vectors, (args, source) = context.saved_all(ctx, are_read=picks)
        source = source._replace(tensors=tuple(tensors))
        if args.shards is not None:
            _refuse_batches(args, incoming)
        acting, found = args.acting(), list[Tensor | None]()
        with torch.no_grad(), _without_autocast(args):
            for m, (of_model, own) in enumerate(zip(vectors, logprobs, strict=True)):
                grad = None
                if of_model is not None:
                    sent = incoming.kl, *_outputs_of(m, args, incoming)
                    grad = of_model.gradient(args, source, m, own, *sent)
                    if acting is not None:
                        grad = grad.masked_fill_(~acting[:, None], 0)
                    if args.shards is not None:  # each rank's gradient is from its shard
                        args.shards.ranks.add_up(grad)
                found += [grad, None, None]
            found = _in_dtypes_of(found, tensors)
        return (*context.guarded(found, *tensors, *incoming), *_CONSTANT)
