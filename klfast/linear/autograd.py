"""The Functions over hidden states, for every compiled backend alike.

=============================== ============== =====================================================
what is differentiated          products       how
=============================== ============== =====================================================
a scalar of divergences alone   2 + 2 a model  the forward makes the gradient of a scalar that is
                                               not scaled yet
numbers per token, both heads   2 + 1 for each the forward leaves the gradient of each number, a
frozen                          kind           vector [D] a token, which the backward scales
numbers per token               2 + 2 + 2 a    the backward makes each chunk's logits again
                                model
=============================== ============== =====================================================

Products of a model that has no gradient, and those of a weight that is frozen, are not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klfast.linear.call import LinearCall
from klfast.linear.held import Vectors, add_divergences, add_tokens, gradient_of, vectors_of
from klfast.linear.models import ChunkOfModel, Gradients
from klfast.linear.rows import Grads, RowOps, Rows, chunks
from klfast.logits.outputs import BesideDivergences, KLDivergence, outputs_of
from klfast.logits.shard_ops import over_shards
from klfast.ops import autograd
from klfast.ops.table import Ops
from klfast.stats import KLStats

NAMES = ("hidden", "weight", "bias", "ref_hidden", "ref_weight", "ref_bias")
"""The tensors of the policy and of the reference, by their names in the public functions."""
TENSORS = 3
"""Of a model that may carry a graph: hidden states, weight, bias."""


def token_logprobs(call: LinearCall, ops: Ops) -> tuple[Tensor, Tensor | None]:
    """Log-probs, and entropies if asked for, in the call's shapes; differentiable once."""
    _refuse_transforms("linear_token_logprobs")
    _, logprobs, entropy, _ = _numbers(call, _plan_of(call, ops))
    assert logprobs is not None
    return logprobs.view(call.picks_shape()), None if entropy is None else entropy.view(call.shape)


def kl_divergence(call: LinearCall, ops: Ops) -> KLDivergence:
    """The reduced divergence, differentiable once, and what else was asked for."""
    _refuse_transforms("linear_kl_divergence")
    plan = _plan_of(call, ops)
    try:
        if _is_scalar(call):
            result, entropy, *stats = _Scalar.apply(*call.tensors(), plan)
            reduced = result, KLStats(*stats) if stats else None
            beside = BesideDivergences(entropies=entropy)
            return outputs_of(call, reduced, beside, lambda c: _reduce(c, ops))
        kl, logprobs, entropy, ref_logprobs = _numbers(call, plan)
        assert kl is not None
        beside = BesideDivergences(logprobs, ref_logprobs, entropy)
        return outputs_of(call, _reduce(call.reduce(kl), ops), beside, lambda c: _reduce(c, ops))
    except RuntimeError:
        call.explain()
        raise


_reduce = autograd.kl_penalty


def _refuse_transforms(function: str) -> None:
    if torch._C._are_functorch_transforms_active() or autograd.is_forward_mode():
        raise RuntimeError(
            f"klfast.{function} runs under torch.func transforms and in forward mode by "
            "backend='reference' alone"
        )


def _in_its_dtypes(tensors: Sequence[Tensor | None]) -> torch.autocast:
    """Products of what they are given: the call has made what autocast asks for of its tensors."""
    device = next(t.device for t in tensors if t is not None)
    return torch.autocast(device.type, enabled=False)


class _Plan(NamedTuple):
    """What a Function needs beside the tensors."""

    call: LinearCall
    """Without its tensors, which autograd keeps."""
    ops: Ops


def _plan_of(call: LinearCall, ops: Ops) -> _Plan:
    return _Plan(call.without_tensors(), over_shards(ops, call.shards))


class _Numbers(NamedTuple):
    """The outputs of a Function of numbers per token, or their gradients; None if not asked for."""

    kl: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    ref_logprobs: Tensor | None

    @classmethod
    def of(cls, rows: Rows, call: LinearCall) -> _Numbers:
        policy, *reference = rows.tokens
        has_ids = call.token_ids is not None
        ref_tokens = reference[0] if reference else None
        return cls(
            rows.kl,
            policy.logprobs if policy is not None and has_ids else None,
            policy.entropy if policy is not None and call.return_entropy else None,
            None if ref_tokens is None else ref_tokens.logprobs,
        )

    def constant(self, wants: Sequence[bool]) -> list[Tensor]:
        """Those of models whose logits need no gradient."""
        of_models = [self.of_tokens(m) for m, want in enumerate(wants) if not want]
        return [tensor for own in of_models for tensor in own if tensor is not None]

    def of_tokens(self, model: int) -> tuple[Tensor | None, Tensor | None]:
        """Those of a model's log-probs and entropies."""
        return (self.logprobs, self.entropy) if model == 0 else (self.ref_logprobs, None)


def _is_scalar(call: LinearCall) -> bool:
    """Whether the forward makes the gradient: nothing flows back but one number's."""
    of = call.divergence
    return (
        of is not None
        and of.spec.reduction.is_scalar()
        and call.token_ids is None
        and (not call.return_entropy or call.detaches_entropy)
        and autograd.may_need_gradient(*call.tensors())
    )


def _numbers(call: LinearCall, plan: _Plan) -> _Numbers:
    """The numbers per token, differentiable once."""
    tensors = call.tensors()
    if not autograd.may_need_gradient(*tensors):
        return _Numbers.of(_computed(call, plan), call)
    heads = [t for model in call.models() for t in model.tensors()[1:]]
    is_frozen = not any(t is not None and t.requires_grad for t in heads)
    function = _Held if is_frozen else _Recomputed
    return _Numbers(*function.apply(*tensors, plan))


def _computed(call: LinearCall, plan: _Plan) -> Rows:
    """The numbers of all tokens, without a graph."""
    kernels = RowOps(call, plan.ops)
    rows = kernels.empty()
    with _in_its_dtypes(call.tensors()):
        for own in chunks(call):
            kernels.compute_tokens(own, rows)
            if rows.kl is not None:
                kernels.divergences(own, rows.kl, rows.kl_saved)
    return rows


def _needs(ctx: Any, models: int) -> list[Sequence[bool]]:
    """Which tensors of each model need a gradient."""
    needs = ctx.needs_input_grad
    return [needs[TENSORS * m : TENSORS * (m + 1)] for m in range(models)]


class _Sums:
    """The gradients of all models."""

    def __init__(self, call: LinearCall, needs: Sequence[Sequence[bool]]) -> None:
        both = zip(call.models(), needs, strict=True)
        self._call = call
        self._of = [Gradients(model, own, call.arithmetic()) for model, own in both]
        self.wants = [any(own) for own in needs]
        """Of which models' logits the gradient is needed."""

    def add(self, own: Sequence[ChunkOfModel], grads: Grads) -> None:
        """Add what the gradients of a chunk's logits bring; None of those that are not wanted."""
        for of, model, grad in zip(self._of, own, grads, strict=True):
            if grad is not None:
                of.add(model, grad)

    def tensors(self) -> list[Tensor | None]:
        """Of all models, after the last chunk."""
        for of in self._of:
            if of.hidden is not None:
                self._call.add_up(of.hidden)
        return [tensor for of in self._of for tensor in of.tensors()]


class _Scalar(torch.autograd.Function):
    """A scalar of the divergences; the forward makes its gradient, the backward scales that."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *tensors, plan = args
        call, ops = plan.call.with_tensors(tensors), plan.ops
        shaped = call.reduce(call.policy.hidden.select(-1, 0))  # numbers of no interest
        weights = autograd.token_weights(shaped, call.arithmetic() == torch.float64, ops)
        sums = _Sums(call, _needs(ctx, len(call.models())))
        kernels, rows = RowOps(call, plan.ops), call.nothing().contiguous()
        policy = kernels.empty_tokens(call.return_entropy)
        with _in_its_dtypes(tensors):
            for own in chunks(call):
                if policy is not None:
                    kernels.compute_model(own[0], policy, want_entropy=True)
                of_chunk = own[0].chunk.of(weights)
                sums.add(own, kernels.divergences(own, rows, [], of_chunk, sums.wants))
        result, stats = _reduce(call.reduce(rows), ops)
        ctx.ops, ctx.is_fresh = ops, True
        # A second derivative says that it depends on the tensors.
        autograd.save(ctx, (*tensors, *sums.tensors()), NAMES[: len(tensors)])
        entropy, others = None if policy is None else policy.entropy, stats or ()
        ctx.mark_non_differentiable(*others, *(() if entropy is None else (entropy,)))
        ctx.set_materialize_grads(False)
        return (result, entropy, *others)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        tensors = len(ctx.needs_input_grad) - 1
        if grad_out is None:
            return (None,) * (tensors + 1)
        saved = autograd.saved(ctx, are_read=False)
        inputs, grads = saved[:tensors], _scaled(ctx, saved[tensors:], grad_out)
        return (*autograd.guarded(_rounded(grads, inputs), *inputs, grad_out), None)


def _scaled(ctx: Any, grads: Sequence[Tensor | None], grad_out: Tensor) -> Sequence[Tensor | None]:
    """The unit gradients times ``grad_out``: in place in the last backward of a graph, else as
    copies.
    """
    is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
    if is_kept or autograd.is_batched(grad_out):
        return [None if grad is None else grad * grad_out for grad in grads]
    if autograd.take(ctx, "is_fresh") is None:  # another thread scales them
        raise RuntimeError("the gradient of klfast.linear_kl_divergence serves one backward")
    with torch.no_grad():
        for grad in grads:
            if grad is not None:
                ctx.ops.scale_(grad, grad_out)
    return grads


def _rounded(
    grads: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients in the dtypes of their tensors."""
    both = zip(grads, tensors, strict=True)
    return [None if g is None or t is None else g.to(t.dtype) for g, t in both]


class _Recomputed(torch.autograd.Function):
    """Numbers per token; the backward makes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> _Numbers:
        *tensors, plan = args
        call = plan.call.with_tensors(tensors)
        rows = _computed(call, plan)
        outputs = _Numbers.of(rows, call)
        autograd.save_all(ctx, (tensors, plan, rows), NAMES[: len(tensors)])
        wants = map(any, _needs(ctx, len(call.models())))
        ctx.mark_non_differentiable(*outputs.constant([*wants]))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        incoming = _Numbers(*grads)
        tensors, plan, rows = autograd.saved_all(ctx)
        call = plan.call.with_tensors(tensors)
        with torch.no_grad(), _in_its_dtypes(tensors):
            sums = _Sums(call, _needs(ctx, len(call.models())))
            kernels = RowOps(call, plan.ops)
            if any(grad is not None for grad in incoming):
                for own in chunks(call):
                    sums.add(own, _chunk_gradients(kernels, own, rows, incoming, sums.wants))
            found = _rounded(sums.tensors(), tensors)
        return (*autograd.guarded(found, *tensors, *incoming), None)


def _chunk_gradients(
    kernels: RowOps,
    own: Sequence[ChunkOfModel],
    rows: Rows,
    incoming: _Numbers,
    wants: Sequence[bool],
) -> Grads:
    """The gradients of a chunk's logits; may take the logits' memory."""
    chunk = own[0].chunk
    grads: Grads = [None] * len(own)
    for m, (model, tokens) in enumerate(zip(own, rows.tokens, strict=True)):
        sent = [None if g is None else g[chunk.at] for g in incoming.of_tokens(m)]
        if wants[m] and tokens is not None and any(g is not None for g in sent):
            in_place = incoming.kl is None and model.head.softcap is None
            grads[m] = kernels.token_gradient(model, tokens, *sent, in_place=in_place)
    if incoming.kl is None:
        return grads
    of_kl = kernels.divergence_gradients(own, rows, incoming.kl, wants)
    pairs = zip(grads, of_kl, strict=True)
    return [g if k is None else k if g is None else k.add_(g) for g, k in pairs]


class _Held(torch.autograd.Function):
    """Numbers per token under frozen heads; the forward leaves the gradient of each number to the
    hidden states, a vector a token.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> _Numbers:
        *tensors, plan = args
        call = plan.call.with_tensors(tensors)
        kernels = RowOps(call, plan.ops)
        rows = kernels.empty()
        wants = [own[0] for own in _needs(ctx, len(call.models()))]
        vectors = [vectors_of(call, m, rows) if want else None for m, want in enumerate(wants)]
        with _in_its_dtypes(tensors):
            for own in chunks(call):
                kernels.compute_tokens(own, rows)
                _store_vectors(kernels, own, rows, vectors)
        # The backward reads the weights' rows of the tokens' words.
        logprobs = [None if own is None else own.logprobs for own in rows.tokens]
        autograd.save_all(ctx, (tensors, plan, logprobs, vectors), NAMES[: len(tensors)])
        ctx.set_materialize_grads(False)
        outputs = _Numbers.of(rows, call)
        ctx.mark_non_differentiable(*outputs.constant(wants))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        incoming = _Numbers(*grads)
        picks = incoming.logprobs is not None or incoming.ref_logprobs is not None
        tensors, plan, logprobs, vectors = autograd.saved_all(ctx, are_read=picks)
        call = plan.call.with_tensors(tensors)
        found: list[Tensor | None] = []
        with torch.no_grad(), _in_its_dtypes(tensors):
            for m, (of_model, own) in enumerate(zip(vectors, logprobs, strict=True)):
                grad = None
                if of_model is not None:
                    sent = incoming.kl, *incoming.of_tokens(m)
                    grad = gradient_of(of_model, call, m, own, *sent)
                    call.add_up(grad)
                found += [grad, None, None]
            found = _rounded(found, tensors)
        return (*autograd.guarded(found, *tensors, *incoming), None)


def _store_vectors(
    kernels: RowOps, own: Sequence[ChunkOfModel], rows: Rows, vectors: Sequence[Vectors | None]
) -> None:
    """Store a chunk's divergences, and the gradients of all its numbers to the hidden states."""
    for model, of_model, tokens in zip(own, vectors, rows.tokens, strict=True):
        if of_model is not None and tokens is not None:
            add_tokens(of_model, kernels, model, tokens)
    if rows.kl is None:
        return
    ones = rows.kl.new_ones(own[0].chunk.tokens)
    wants = [of_model is not None for of_model in vectors]
    grads = kernels.divergences(own, rows.kl, rows.kl_saved, ones, wants)
    for model, of_model, grad in zip(own, vectors, grads, strict=True):
        if of_model is not None and grad is not None:
            add_divergences(of_model, model, grad)
