"""The readable specification over rows: textbook formulas in float64, differentiated by context.

Logits of hidden states are held whole. A masked row is replaced before anything looks at it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from klfast.args.heads import Model
from klfast.args.logits import NO_ID, SERVES_ONE_BACKWARD, Logits
from klfast.args.rows import Rows, RowsArgs, without_idle
from klfast.autograd import context
from klfast.autograd.chunks import chunks_of
from klfast.autograd.token_loss import loss_of
from klfast.backends.finish import outputs_of
from klfast.backends.reference.penalty import kl_penalty
from klfast.backends.reference.shards import AddedUp, whole
from klfast.formulas.divergences import half_distance, log_mixture, term
from klfast.formulas.estimators import zero_at
from klfast.stats.outputs import Outputs
from klfast.types.dtypes import has_float64, picks_dtype, wide, wide_dtype


def rows(args: RowsArgs) -> Outputs:
    """Compute the outputs of a call over rows."""
    if args.reduced is None or args.reduced.weights is None:
        return outputs_of(args, _rows_of(args), kl_penalty)
    # The statistics need rows of weight 0, which give the divergence no gradient.
    reads_ids = args.teacher is not None or args.loss is not None
    own = args._replace(
        token_ids=args.token_ids if reads_ids else None,
        return_entropy=False,
        reduced=args.reduced._replace(return_stats=False),
    )
    own = without_idle(own)
    unweighted = args.reduced._replace(weights=None) if args.loss is None else None
    others = rows(args._replace(loss=None, reduced=unweighted))
    return others._replace(kl=outputs_of(own, _rows_of(own), kl_penalty).kl)


def _rows_of(args: RowsArgs) -> Rows:
    """Compute the requested outputs of each token, in nats, in the arithmetic's dtype.

    KL(first || second) is sum p log(p / q). ``jsd``: with m = (1 - b) p + b q, (1 - b) sum p
    log(p / m) + b sum q log(q / m). ``tv``: 1/2 sum |p - q|. ``skew``: with m = a p + (1 - a) q,
    sum p log(p / m). The entropy is -sum p log p, and NaN where the divergence is.
    """
    logits = [whole(of_model, args.shards) for of_model in _logits_of(args)]
    models = [_log_softmax(of_model, args.keep, _temperature_of(args)) for of_model in logits]
    arithmetic, kl, entropy = args.dtype, None, None
    if args.divergence is not None:
        kl = _divergences(args, logits, *models)
        kl = _zero_where_masked(kl, args.keep).to(arithmetic)
    taken: list[Tensor | None] = [None, None]
    if (ids := args.token_ids) is not None:
        dtype = picks_dtype(ids, arithmetic) if has_float64(ids.device) else arithmetic
        taken[: len(models)] = [_taken_of(x, ids, args.keep).to(dtype) for x in models]
    if args.loss is not None:
        assert taken[0] is not None
        kl = _losses_of(args, taken[0])
    if args.return_entropy:
        of_policy = models[args.policy]
        entropy = -_expectation(of_policy, of_policy)
        entropy = _zero_where_masked(entropy, args.keep).to(arithmetic)
        if kl is not None and args.loss is None:
            entropy = torch.where(kl.isnan(), torch.nan, entropy)
    return Rows(kl, taken[0], taken[1], entropy)


def _divergences(args: RowsArgs, logits: list[Tensor], p: Tensor, q: Tensor) -> Tensor:
    """[R] divergences of log-probs, [R, V]."""
    ratio = _log_ratio(args, logits, p, q) if p.dtype == torch.float32 else None
    assert args.divergence is not None
    kl = _FORMULAS[args.divergence](p, q, ratio, args.parameter)
    # Rounding may leave a number below 0, or a JSD of equal models that is not 0.
    return zero_at((kl < 0) | (p == q).all(-1), kl)


def _jsd(p: Tensor, q: Tensor, ratio: Tensor | None, b: float) -> Tensor:
    m, of_p, of_q = _log_mixture(p, q, ratio, 1 - b, b)
    return (1 - b) * _divergence(p, m, of_p) + b * _divergence(q, m, of_q)


def _skew(p: Tensor, q: Tensor, ratio: Tensor | None, a: float) -> Tensor:
    m, of_p, _ = _log_mixture(p, q, ratio, a, 1 - a)
    return _divergence(p, m, of_p)


def _logits_of(args: RowsArgs) -> list[Tensor]:
    """[A, T, V] of each model, for the entries of this rank."""
    source = args.source
    if isinstance(source, Logits):
        return (
            [*map(_Overwritten.apply, source.tensors)]
            if args.inplace_backward
            else [*source.tensors]
        )
    return [_logits_of_hidden(args, model) for model in source.models()]


def _logits_of_hidden(args: RowsArgs, model: Model) -> Tensor:
    """[1, R, V] in float64: softcap(hidden @ weight.T + bias), of zeros where masked."""
    hidden, (weight, bias, softcap) = model
    dtype = wide_dtype(hidden.device)
    # Both models are copied into one layout, so that a matmul of equal models rounds alike.
    rows, weight = (
        x.to(dtype, memory_format=torch.contiguous_format, copy=True) for x in (hidden, weight)
    )
    if args.shards is not None:
        rows = AddedUp.apply(rows, args.shards)  # type: ignore[no-untyped-call]
    if args.keep is not None:
        rows = torch.where(args.keep[:, None], rows, 0.0)
    logits = torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits[None]


def _temperature_of(args: RowsArgs) -> float | Tensor:
    """A number or a tensor, 0-dim or one a row, [R, 1]."""
    inverse = args.inverse_temperature
    if inverse is None:
        return args.temperature
    if inverse.dim() == 0:
        return 1 / inverse
    return torch.where(inverse > 0, 1 / inverse, torch.nan)[:, None]


def _log_softmax(logits: Tensor, keep: Tensor | None, temperature: float | Tensor) -> Tensor:
    """[A, T, V] -> [R, V]: log-probs in float64, and a uniform distribution where masked.

    The greatest logit is subtracted before the temperature: that is exact for logits near it.
    """
    rows = _wide_rows(logits, keep)
    greatest = rows.detach().amax(-1, keepdim=True)
    return ((rows - greatest) / temperature).log_softmax(-1)


def _wide_rows(logits: Tensor, keep: Tensor | None) -> Tensor:
    """[A, T, V] -> [R, V], in float64; 0 where masked.

    The rows are contiguous: equal logits give equal sums, whatever their strides are.
    """
    rows = wide(logits).flatten(0, 1).contiguous()
    return rows if keep is None else torch.where(keep[:, None], rows, 0.0)


def _expectation(logprobs: Tensor, values: Tensor) -> Tensor:
    """Sum over the vocabulary of exp(logprobs) * values; an entry of probability 0 adds 0.

    A probability too small for float64 is none, and times infinity still infinite.
    """
    # Replaced before the product: 0 times infinity is NaN, and so is its gradient.
    possible = logprobs != -torch.inf
    weights = torch.where(possible, logprobs, 0.0).exp()
    terms = weights * torch.where(possible, values, 0.0)
    terms = torch.where((weights == 0) & (values == torch.inf), values, terms)
    return torch.where(possible, terms, 0.0).sum(-1)


def _divergence(p: Tensor, q: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Sum over the vocabulary of p log(p / q), of log-probs.

    In float32 that cancels: there the terms are p log(p / q) - p + q, which are never negative.
    ``log_ratio``: log(q / p) there, where it has more digits than the difference.
    """
    if p.dtype == torch.float64:
        return _expectation(p, p - q)
    terms = term(p, q, log_ratio)
    is_infinite = (q == -torch.inf) & (p != -torch.inf)
    return torch.where(is_infinite & terms.isfinite(), p - q, terms).sum(-1)


def _log_ratio(args: RowsArgs, logits: list[Tensor], p: Tensor, q: Tensor) -> Tensor:
    """log(q / p) of every token id, with the digits of the logits' difference, [R, V].

    The log-sum-exps give all of a row one common error. A KL changes by its square, but total
    variation by itself, so that the sum of q, which is 1, takes it away.
    """
    first, second = (_wide_rows(x, args.keep) for x in logits)
    apart = (second - first) / _temperature_of(args)
    # There both log-probs are near 0, where fp32 rounds them least.
    shared = (p + q).argmax(-1, keepdim=True)
    ratio = apart - (apart - (q - p)).gather(-1, shared)
    with torch.no_grad():
        excess = _expectation(p, ratio.expm1())[:, None]
        is_known = ((p != -torch.inf) | (q == -torch.inf)).all(-1, keepdim=True)
        error = torch.where(is_known & (excess.abs() < 1e-3), excess.log1p(), 0.0)
    return ratio - error


def _log_mixture(
    p: Tensor, q: Tensor, ratio: Tensor | None, of_p: float, of_q: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The log of m = of_p p + of_q q, and log(m / p) and log(m / q) if ``ratio`` has digits."""
    m = log_mixture(p, q, of_p, of_q)
    if ratio is None:
        return m, None, None
    return m, _mixed(ratio, m - p, of_q), _mixed(-ratio, m - q, of_p)


def _mixed(log_ratio: Tensor, log_of_mixture: Tensor, b: float) -> Tensor:
    """log(1 - b + b e^log_ratio), which is ``log_of_mixture`` with few digits near 0."""
    is_near = log_ratio.abs() <= 1
    near = torch.log1p(b * torch.where(is_near, log_ratio, 0.0).expm1())
    return torch.where(is_near, near, log_of_mixture)


_FORMULAS = {
    "kl": lambda p, q, ratio, _: _divergence(p, q, ratio),
    "jsd": _jsd,
    "tv": lambda p, q, ratio, _: half_distance(p, q, ratio).sum(-1),
    "skew": _skew,
}


def _taken_of(logprobs: Tensor, token_ids: Tensor, keep: Tensor | None) -> Tensor:
    """The log-probs of ids [R] or [R, K], 0 where masked and where there is no id.

    An id outside the vocabulary gives NaN if nothing has checked the ids.
    """
    has_k = token_ids.dim() == 2
    exist = token_ids != NO_ID if has_k else torch.ones_like(token_ids, dtype=torch.bool)
    if keep is not None:
        exist = exist & (keep[:, None] if has_k else keep)
    are_words = (token_ids >= 0) & (token_ids < logprobs.shape[-1])
    ids = torch.where(are_words, token_ids, 0)
    columns = ids if has_k else ids[:, None]
    taken = logprobs.gather(-1, columns).view(ids.shape)
    return torch.where(exist, torch.where(are_words, taken, torch.nan), 0.0)


def _losses_of(args: RowsArgs, logprobs: Tensor) -> Tensor:
    """The caller's losses of the kept tokens, [R]; 0 where masked."""
    losses = 0.0 * logprobs  # with a graph, if no chunk has one
    for chunk in chunks_of(len(losses), args.keep, max(1, len(losses)), padded=False):
        chunk.put(losses, loss_of(args, chunk, logprobs).values)
    return losses


def _zero_where_masked(rows: Tensor, keep: Tensor | None) -> Tensor:
    return rows if keep is None else torch.where(keep, rows, 0.0)


class _Overwritten(torch.autograd.Function):
    """The logits, whose memory holds the gradient after backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        context.save(ctx, (logits,), ("logits",))
        ctx.overwritten = False
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.overwritten or torch.is_grad_enabled():
            raise RuntimeError(SERVES_ONE_BACKWARD)
        ctx.overwritten = True
        (logits,) = context.saved(ctx)
        assert logits is not None
        return logits.detach().copy_(grad)
