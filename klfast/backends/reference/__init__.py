"""The readable specification in float64, on any device."""

from __future__ import annotations

from klfast.backends.backend import Backend
from klfast.backends.reference.logits import kl_divergence, token_logprobs
from klfast.backends.reference.penalty import kl_penalty

REFERENCE = Backend("reference", lambda device: None, kl_penalty, token_logprobs, kl_divergence)
