"""NeMo-RL, whose releases are git tags: v0.5.0 to v0.7.0 and its main branch of August 2026."""

from __future__ import annotations

from klfast.compat import nemo_rl
from klfast.compat.patching.replacements import replacement
from klfast.compat.patching.sites import Form, Site, Target

_KL = replacement(nemo_rl.calculate_kl)

TARGETS = (
    Target(
        ("nemo_rl",),
        "v0.5.0 to v0.7.0, main",
        (
            (
                Site(
                    "nemo_rl.algorithms.utils:calculate_kl",
                    (
                        # Without weights, which its loss multiplies after the limit.
                        Form("c891db1099c56ab3", "v0.5.0, v0.6.0", _KL),
                        Form("b69fdd5ddabac7d0", "v0.7.0, main", _KL),
                    ),
                ),
            ),
        ),
        exact=True,
        distribution="nemo-rl",
    ),
)
