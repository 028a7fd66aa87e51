"""The readable specification over logits: textbook formulas in float64, differentiated by autograd.

A masked row is replaced before anything looks at it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from klfast.backends.reference.penalty import kl_penalty
from klfast.backends.reference.shards import whole
from klfast.dtypes import arithmetic_dtype, wide
from klfast.formulas import zero_at
from klfast.logits.arguments import NO_ID
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.logits.entries import term
from klfast.logits.inplace import SERVES_ONE_BACKWARD
from klfast.logits.outputs import BesideDivergences, KLDivergence, outputs_of
from klfast.ops import autograd


def token_logprobs(call: TokenLogprobsCall) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies: log softmax(logits / temperature) and -sum p log p."""
    logits = overwritten(call.logits) if call.inplace_backward else call.logits
    logits = whole(logits, call.shards)
    arithmetic = arithmetic_dtype(logits)
    logprobs = _log_softmax(logits, call.keep, temperature_of(call))
    taken = taken_of(logprobs, call.token_ids, call.keep)
    entropy = None
    if call.return_entropy:
        entropy = entropies_of(logprobs, call.keep).to(arithmetic).view(call.rows_shape)
    return taken.to(arithmetic).view(call.shape), entropy


def kl_divergence(call: KLDivergenceCall) -> KLDivergence:
    """The divergence and what else is asked for. See ``klfast.kl_divergence``."""
    rows, beside = _rows_of(call)
    return outputs_of(call, kl_penalty(call.reduce(rows)), beside, kl_penalty)


def divergences(call: KLDivergenceCall) -> Tensor:
    """[R] divergences of rows, in the arithmetic's dtype."""
    return _rows_of(call)[0]


def _rows_of(call: KLDivergenceCall) -> tuple[Tensor, BesideDivergences]:
    """[R] divergences of policy p and reference q, in nats, in the arithmetic's dtype.

    ``reverse``: sum p log(p / q). ``forward``: sum q log(q / p). ``jsd``: with m = (1 - b) p + b q,
    (1 - b) sum p log(p / m) + b sum q log(q / m). The entropy is -sum p log p, and NaN where the
    divergence is.
    """
    arithmetic = arithmetic_dtype(call.logits, call.ref_logits)
    call = call._replace(
        logits=whole(call.logits, call.shards), ref_logits=whole(call.ref_logits, call.shards)
    )
    p, q = (
        _log_softmax(logits, call.keep, temperature_of(call))
        for logits in (call.logits, call.ref_logits)
    )
    ratio = _log_ratio(call, p, q) if p.dtype == torch.float32 else None
    if call.direction == "reverse":
        rows = divergence(p, q, ratio)
    elif call.direction == "forward":
        rows = divergence(q, p, None if ratio is None else -ratio)
    else:
        b = call.jsd_beta
        m = _log_mixture(p, q, b)
        of_p = of_q = None
        if ratio is not None:
            of_p, of_q = _mixed(ratio, m - p, b), _mixed(-ratio, m - q, 1 - b)
        rows = (1 - b) * divergence(p, m, of_p) + b * divergence(q, m, of_q)
    # Rounding may leave a number below 0, or a JSD of equal models that is not 0.
    rows = zero_at((rows < 0) | (p == q).all(-1), rows)
    rows = zero_where_masked(rows, call.keep).to(arithmetic)
    entropies = None
    if call.return_entropy:
        entropies = entropies_of(p, call.keep).to(arithmetic)
        entropies = torch.where(rows.isnan(), torch.nan, entropies)
    if call.token_ids is None:
        return rows, BesideDivergences(entropies=entropies)
    taken, ref_taken = (taken_of(x, call.token_ids, call.keep).to(arithmetic) for x in (p, q))
    return rows, BesideDivergences(taken, ref_taken, entropies)


def temperature_of(call: TokenLogprobsCall | KLDivergenceCall) -> float | Tensor:
    """A number or a tensor, 0-dim or one a row, [R, 1]."""
    inverse = call.inverse_temperature
    if inverse is None:
        return call.temperature
    if inverse.dim() == 0:
        return 1 / inverse
    return torch.where(inverse > 0, 1 / inverse, torch.nan)[:, None]


def _log_softmax(logits: Tensor, keep: Tensor | None, temperature: float | Tensor) -> Tensor:
    """[A, T, V] -> [R, V]: log-probs in float64; of equal words where masked.

    The greatest logit is subtracted before the temperature: that is exact for logits near it.
    """
    rows = wide_rows(logits, keep)
    greatest = rows.detach().amax(-1, keepdim=True)
    return ((rows - greatest) / temperature).log_softmax(-1)


def wide_rows(logits: Tensor, keep: Tensor | None) -> Tensor:
    """[A, T, V] -> [R, V], in float64; 0 where masked.

    The rows are contiguous: equal logits give equal sums, whatever their strides are.
    """
    rows = wide(logits).flatten(0, 1).contiguous()
    return rows if keep is None else torch.where(keep[:, None], rows, 0.0)


def expectation(logprobs: Tensor, values: Tensor) -> Tensor:
    """Sum over the vocabulary of exp(logprobs) * values; a word of probability 0 adds 0.

    A probability too small for float64 is none, and times infinity still infinite.
    """
    possible = logprobs != -torch.inf
    weights = torch.where(possible, logprobs, 0.0).exp()
    terms = weights * torch.where(possible, values, 0.0)
    terms = torch.where((weights == 0) & (values == torch.inf), values, terms)
    return torch.where(possible, terms, 0.0).sum(-1)


def divergence(p: Tensor, q: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Sum over the vocabulary of p log(p / q), of log-probs.

    In float32 that cancels: there the terms are p log(p / q) - p + q, which are never negative.
    ``log_ratio``: log(q / p) there, where it has more digits than the difference.
    """
    if p.dtype == torch.float64:
        return expectation(p, p - q)
    terms = term(p, q, log_ratio)
    is_infinite = (q == -torch.inf) & (p != -torch.inf)
    return torch.where(is_infinite & terms.isfinite(), p - q, terms).sum(-1)


def _log_ratio(call: KLDivergenceCall, p: Tensor, q: Tensor) -> Tensor:
    """log(q / p) of every token id, with the digits of the logits' difference, [R, V].

    The log-sum-exps give all of a row one common error. A divergence changes by its square.
    """
    first, second = (wide_rows(x, call.keep) for x in (call.logits, call.ref_logits))
    apart = (second - first) / temperature_of(call)
    shared = (p + q).argmax(-1, keepdim=True)
    return apart - (apart - (q - p)).gather(-1, shared)


def _mixed(log_ratio: Tensor, log_of_mixture: Tensor, b: float) -> Tensor:
    """log(1 - b + b e^log_ratio), which is ``log_of_mixture`` with few digits near 0."""
    is_near = log_ratio.abs() <= 1
    near = torch.log1p(b * torch.where(is_near, log_ratio, 0.0).expm1())
    return torch.where(is_near, near, log_of_mixture)


def entropies_of(logprobs: Tensor, keep: Tensor | None) -> Tensor:
    """-sum p log p; 0 where masked."""
    return zero_where_masked(-expectation(logprobs, logprobs), keep)


def _log_mixture(p: Tensor, q: Tensor, b: float) -> Tensor:
    """log((1 - b) exp(p) + b exp(q)); a word that neither says is left out: its slope is NaN."""
    possible = (p != -torch.inf) | (q != -torch.inf)
    p, q = torch.where(possible, p, 0.0), torch.where(possible, q, 0.0)
    mixed = torch.logaddexp(p + math.log(1 - b), q + math.log(b))
    return torch.where(possible, mixed, -torch.inf)


def taken_of(logprobs: Tensor, token_ids: Tensor, keep: Tensor | None) -> Tensor:
    """The log-probs of ids [R] or [R, K]; 0 where masked, and where there is no id. NaN of an id
    that is no word, where none has looked.
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


def zero_where_masked(rows: Tensor, keep: Tensor | None) -> Tensor:
    return rows if keep is None else torch.where(keep, rows, 0.0)


def overwritten(logits: Tensor) -> Tensor:
    """The logits, whose memory will hold their gradient."""
    result: Tensor = _Overwritten.apply(logits)
    return result


class _Overwritten(torch.autograd.Function):
    """Its input, whose memory holds the gradient after backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        autograd.save(ctx, (logits,), ("logits",))
        ctx.overwritten = False
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.overwritten or torch.is_grad_enabled():
            raise RuntimeError(SERVES_ONE_BACKWARD)
        ctx.overwritten = True
        (logits,) = autograd.saved(ctx)
        assert logits is not None
        return logits.detach().copy_(grad)
