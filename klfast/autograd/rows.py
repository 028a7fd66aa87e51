"""Makes the ops over logits differentiable, the same for every compiled backend.

An op works on rows, from logits [A, T, V] to numbers [R], R = A * T. ``klfast.autograd.penalty``
reduces one number per row. The forward computes the gradient of a scalar reduction in its read, in
three steps:

1. ``RowReducer`` gives each row's weight in the result, which depends on mask and ``weights``;
2. the forward writes weight times gradient;
3. the backward scales it by ``grad_out``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klfast.args.logits import SERVES_ONE_BACKWARD, Logits
from klfast.args.rows import ENTROPIES, Rows, RowsArgs
from klfast.args.values import are_tracing
from klfast.autograd import context
from klfast.autograd.penalty import RowReducer
from klfast.ops.schemas import Ops
from klfast.stats.kl import KLStats

OF_ONE_MODEL = ("logits", "token_ids", "mask")
OF_TWO_MODELS = ("logits or ref_logits", "logits or ref_logits", *OF_ONE_MODEL[1:])
"""The names of a call's tensors in the public functions. The direction orders two models."""


def is_one_read(args: RowsArgs, source: Logits) -> bool:
    """True if the forward can write the gradient: a known scalar alone sends one back."""
    models = source.tensors
    return (
        args.reduced is not None
        and args.reduced.spec.reduction.result == "scalar"
        and args.token_ids is None
        and not args.return_entropy
        and args.shards is None  # the gradient of a shard takes its own read
        and context.may_need_gradient(*models)
        and not are_tracing()
        and not context.are_packed()  # hooks see only saved tensors
        # fp16 cannot hold it: see holds_unit_gradient.
        and not (models[0].requires_grad and models[0].dtype == torch.float16)
        and not (models[1].requires_grad and models[1].dtype == torch.float16)
    )


def one_read(args: RowsArgs, source: Logits, ops: Ops) -> tuple[Tensor, KLStats | None]:
    """A scalar of the divergences, whose gradient the forward writes, and its statistics."""
    result, *statistics = context.apply(_OneReadKL, *source.tensors, args, ops)
    return result, KLStats(*statistics) if statistics else None


def rows_of(args: RowsArgs, source: Logits, ops: Ops) -> Rows:
    """The requested values of each token, differentiable once."""
    models, ids, inverse = source.tensors, args.token_ids, args.inverse_temperature
    needs_gradient = context.may_need_gradient(*models)
    if args.divergence is None:
        arguments = (*models, ids, args.keep, args.temperature, bool(args.return_entropy), inverse)
        if needs_gradient:
            logprobs, entropy, _ = context.apply(
                _TokenLogprobs, *arguments, args.inplace_backward, ops
            )
        else:
            logprobs, entropy, _ = ops.token_logprobs_fwd(*arguments)
        return Rows(logprobs=logprobs, entropy=entropy if args.return_entropy else None)
    inputs, options = (*models, ids, args.keep), (*args.options(), args.entropy_of())
    if needs_gradient:
        kl, logprobs, ref_logprobs, entropy, _ = context.apply(
            _KLRows, *inputs, inverse, *options, ops
        )
    else:
        kl, logprobs, ref_logprobs, *_, entropy = ops.kl_divergence_fwd(
            *inputs, *options, None, False, False, inverse
        )
    if ids is None:
        logprobs = ref_logprobs = None
    return Rows(kl, logprobs, ref_logprobs, entropy if args.return_entropy else None)


_NO_ENTROPY = ENTROPIES.index("none")


class _TokenLogprobs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *arguments, _, ops = args
        outputs: tuple[Tensor, Tensor, Tensor] = ops.token_logprobs_fwd(*arguments)
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, token_ids, keep, ctx.temperature, ctx.want_entropy, inverse, *rest = inputs
        ctx.in_place, ctx.ops = rest
        ctx.is_fresh = True
        logprobs, entropy, saved = output
        tensors = (logits, token_ids, keep, saved, logprobs, entropy, inverse)
        context.save(ctx, tensors, OF_ONE_MODEL)
        ctx.mark_non_differentiable(*((saved,) if ctx.want_entropy else (entropy, saved)))
        # Rather None than zeros for an output without a gradient. In some versions of torch,
        # torch.func's rules for a Function take only tensors, and a compiler removes the zeros.
        if not are_tracing():
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        if ctx.in_place:
            if any(g is not None and context.is_batched(g) for g in (grad_logprobs, grad_entropy)):
                raise RuntimeError(
                    "inplace_backward must be False for a batch of gradients, got True"
                )
            if torch.is_grad_enabled() or context.take(ctx, "is_fresh") is None:
                raise RuntimeError(SERVES_ONE_BACKWARD)
        logits, *others, inverse = context.saved(ctx)
        assert logits is not None
        of_logprobs = None if grad_logprobs is None else grad_logprobs.contiguous()
        of_entropy = None
        if ctx.want_entropy and grad_entropy is not None:
            of_entropy = grad_entropy.contiguous()
        arguments = (*others, ctx.temperature, of_logprobs, of_entropy, inverse)
        if ctx.in_place:
            ctx.ops.token_logprobs_bwd_(logits, *arguments)
            # As torch's own in-place ops do, so that other ops that saved the logits raise.
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), *(None,) * 7
        with context.without_graph():
            grad = ctx.ops.token_logprobs_bwd(logits, *arguments)
        depends_on = (logits, grad_logprobs, grad_entropy)
        return *context.guarded([grad], *depends_on), *(None,) * 7


class _KLRows(torch.autograd.Function):
    """Divergences of rows. The backward reads the logits again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        *tensors, inverse, divergence, parameter, temperature, entropy_of, ops = args
        options = (divergence, parameter, temperature, entropy_of)
        rows, logprobs, ref_logprobs, saved, _, _, entropies = ops.kl_divergence_fwd(
            *tensors, *options, None, False, False, inverse
        )
        return rows, logprobs, ref_logprobs, entropies, saved

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, divergence, parameter, temperature, entropy_of, ctx.ops = inputs
        ctx.options = (divergence, parameter, temperature, entropy_of)
        rows, logprobs, ref_logprobs, entropies, saved = output
        ctx.has_tokens = tensors[2] is not None
        ctx.has_entropies = ENTROPIES[entropy_of] != "none"
        # The inverse temperature is the last of the tensors.
        own = (rows, saved, entropies if ctx.has_entropies else None)
        context.save(ctx, (*tensors, *own), OF_TWO_MODELS)
        no_gradient = [saved]
        if not ctx.has_tokens:
            no_gradient += [logprobs, ref_logprobs]
        if not ctx.has_entropies:
            no_gradient += [entropies]
        ctx.mark_non_differentiable(*no_gradient)
        if not are_tracing():
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any,
        grad_rows: Tensor | None,
        grad_logprobs: Tensor | None,
        grad_ref_logprobs: Tensor | None,
        grad_entropies: Tensor | None,
        _: Any,
    ) -> tuple[Tensor | None, ...]:
        of_tokens = (grad_logprobs, grad_ref_logprobs) if ctx.has_tokens else (None, None)
        incoming = (grad_rows, *of_tokens, grad_entropies if ctx.has_entropies else None)
        if all(grad is None for grad in incoming):
            return (None,) * 10
        *saved, entropies = context.saved(ctx)
        grads = _recompute(ctx, saved, entropies, *incoming)
        return (*context.guarded(grads, *saved[:2], *incoming), *(None,) * 8)


def _recompute(
    ctx: Any, saved: Sequence[Tensor | None], entropies: Tensor | None, *incoming: Tensor | None
) -> context.Grads:
    """The gradients by a second read of the logits. Incoming gradients are for divergences, for the
    tokens' log-probs under either model, and for entropies.
    """
    *tensors, inverse, rows, state = saved
    needs = ctx.needs_input_grad[:2]
    with context.without_graph():
        grads: context.Grads = ctx.ops.kl_divergence_bwd(
            *tensors,
            *ctx.options,
            rows,
            state,
            entropies,
            *(None if grad is None else grad.contiguous() for grad in incoming),
            *needs,
            inverse,
        )
    return grads


class _OneReadKL(torch.autograd.Function):
    """A scalar of the divergences, with the gradient from the same read.

    A later backward reads the logits again. For inference tensors the unit gradients are kept as
    long as the graph is retained, so that the tensors are never read again.
    """

    @staticmethod
    def forward(
        ctx: Any, first: Tensor, second: Tensor, args: RowsArgs, ops: Ops
    ) -> tuple[Tensor, ...]:
        like = first.select(-1, 0)  # a view; only its shape is used
        reducer = RowReducer(args.reduction_call(like), ops)
        weights = reducer.weights(args.dtype)
        ctx.options, ctx.ops = (*args.options(), _NO_ENTROPY), ops
        needs = ctx.needs_input_grad[:2]
        kl, _, _, saved, *grads, _ = ops.kl_divergence_fwd(
            *(first, second, None, args.keep),
            *ctx.options,
            weights,
            *needs,
            args.inverse_temperature,
        )
        result, stats = reducer.reduce(kl)
        # Autograd sees no change of an inference tensor, and a copy would have the logits' size.
        models = (
            None if first.is_inference() else first,
            None if second.is_inference() else second,
        )
        ctx.is_read_once = None in models
        own = (None, args.keep, args.inverse_temperature, kl, saved, weights)
        context.save(ctx, (*models, *own), OF_TWO_MODELS)
        ctx.unit_grads = context.wanted(grads, needs)
        ctx.mark_non_differentiable(*(stats or ()))
        ctx.set_materialize_grads(False)
        return result, *(stats or ())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            context.take(ctx, "unit_grads")
            return (None,) * 4
        grads = context.take_unit_gradients(ctx, grad_out, keep=ctx.is_read_once)
        saved = context.saved(ctx) if grads is None or torch.is_grad_enabled() else []
        if grads is None:
            *inputs, weights = saved
            assert weights is not None
            none = (None, None, None)
            grads = _recompute(ctx, inputs, None, weights * grad_out, *none)
        return (*context.guarded(grads, *saved[:2], grad_out), None, None)
