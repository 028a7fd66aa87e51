"""The readable specification, on any device: in float64, or in float32 on a device without it."""

from __future__ import annotations

from klfast.backends.backend import Backend
from klfast.backends.reference.penalty import kl_penalty
from klfast.backends.reference.rollout import rollout_correction
from klfast.backends.reference.rows import rows

REFERENCE = Backend(
    "reference",
    lambda device: None,
    kl_penalty,
    rows,
    rollout_correction,
)
