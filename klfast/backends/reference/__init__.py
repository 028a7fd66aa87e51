"""The readable specification, on any device: in float64, or in float32 on a device without it."""

from __future__ import annotations

from torch import Tensor

from klfast.backends.backend import Backend
from klfast.backends.reference import logits, shards
from klfast.backends.reference.linear import linear_kl_divergence, linear_token_logprobs
from klfast.backends.reference.penalty import kl_penalty
from klfast.backends.reference.rollout import rollout_correction
from klfast.logits.call import KLDivergenceCall, TokenLogprobsCall
from klfast.logits.outputs import KLDivergence


def _token_logprobs(call: TokenLogprobsCall) -> tuple[Tensor, Tensor | None]:
    return logits.token_logprobs(call) if call.shards is None else shards.token_logprobs(call)


def _kl_divergence(call: KLDivergenceCall) -> KLDivergence:
    return logits.kl_divergence(call) if call.shards is None else shards.kl_divergence(call)


REFERENCE = Backend(
    "reference",
    lambda device: None,
    kl_penalty,
    _token_logprobs,
    _kl_divergence,
    linear_token_logprobs,
    linear_kl_divergence,
    rollout_correction,
)
