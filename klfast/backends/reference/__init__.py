"""The readable specification, on any device: in float64, or in float32 on a device without it."""

from __future__ import annotations

from klfast.backends.backend import Backend
from klfast.backends.reference.linear import linear_kl_divergence, linear_token_logprobs
from klfast.backends.reference.logits import kl_divergence, token_logprobs
from klfast.backends.reference.penalty import kl_penalty
from klfast.backends.reference.rollout import rollout_correction

REFERENCE = Backend(
    "reference",
    lambda device: None,
    kl_penalty,
    token_logprobs,
    kl_divergence,
    linear_token_logprobs,
    linear_kl_divergence,
    rollout_correction,
)
