"""The readable specification from hidden states: the logits in float64, whole, and what the
specification over logits says of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.backends.reference import logits as over_logits
from klfast.backends.reference.penalty import kl_penalty
from klfast.backends.reference.shards import added_up
from klfast.dtypes import wide_dtype
from klfast.linear.call import LinearCall, Model
from klfast.linear.chunks import chunks_of
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.logits.outputs import BesideDivergences, KLDivergence, outputs_of


def linear_token_logprobs(call: LinearCall) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies. See ``klfast.linear_token_logprobs``."""
    logits = _logits(call, call.policy)
    _show(call, logits)
    logprobs, entropy = _tokens(call, logits)
    assert logprobs is not None
    return logprobs.view(call.picks_shape()), None if entropy is None else entropy.view(call.shape)


def linear_kl_divergence(call: LinearCall) -> KLDivergence:
    """The divergence and what else is asked for. See ``klfast.linear_kl_divergence``."""
    of = call.divergence
    assert of is not None
    policy, reference = (_logits(call, model) for model in call.models())
    _show(call, policy)
    over = KLDivergenceCall(
        policy,
        reference,
        None,
        call.keep,
        of.direction,
        of.jsd_beta,
        call.temperature,
        call.inverse_temperature,
        call.shape,
        of.layout,
        of.spec,
        of.return_stats,
        return_entropy=False,
        shards=call.shards,
    )
    rows = over_logits.divergences(over).to(call.arithmetic())
    (logprobs, entropy), (ref_logprobs, _) = (_tokens(call, own) for own in (policy, reference))
    beside = BesideDivergences(logprobs, ref_logprobs, entropy)
    if entropy is not None:
        beside = beside._replace(entropies=torch.where(rows.isnan(), torch.nan, entropy))
    return outputs_of(call, kl_penalty(call.reduce(rows)), beside, kl_penalty)


def _tokens(call: LinearCall, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """[R] or [R, K] log-probs and [R] entropies of a model; None if not asked for."""
    ids, rows = call.token_ids, call.shape.numel()
    over = TokenLogprobsCall(
        logits,
        torch.zeros(rows, dtype=torch.int64, device=logits.device) if ids is None else ids,
        call.keep,
        call.temperature,
        call.inverse_temperature,
        call.return_entropy,
        inplace_backward=False,
        shape=torch.Size([rows]) if ids is None else ids.shape,
        rows_shape=torch.Size([rows]),
        shards=call.shards,
    )
    logprobs, entropy = over_logits.token_logprobs(over)
    return (
        None if ids is None else logprobs.to(call.arithmetic()),
        None if entropy is None else entropy.to(call.arithmetic()),
    )


def _show(call: LinearCall, logits: Tensor) -> None:
    """Call ``on_chunk`` with the logits of all tokens that exist, [1, R, V]."""
    if call.on_chunk is None:
        return
    length = max(call.shape.numel(), 1)
    for chunk in chunks_of(call.shape.numel(), call.keep, length, padded=False):
        call.on_chunk(logits.detach()[0, chunk.at], chunk)


def _logits(call: LinearCall, model: Model) -> Tensor:
    """[1, R, V] in float64: softcap(hidden @ weight.T + bias), of zeros where masked."""
    hidden, (weight, bias, softcap) = model
    dtype = wide_dtype(hidden.device)
    # Both models are copied into one layout, so that a matmul of equal models rounds alike.
    rows, weight = (
        x.to(dtype, memory_format=torch.contiguous_format, copy=True) for x in (hidden, weight)
    )
    if call.shards is not None:
        rows = added_up(rows, call.shards)
    if call.keep is not None:
        rows = torch.where(call.keep[:, None], rows, 0.0)
    logits = torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits[None]
