"""slime, whose releases are git tags: v0.2.1 to v0.3.1 and its main branch of August 2026."""

from __future__ import annotations

from klfast.compat import slime
from klfast.compat.patching.sites import Target, known_compiled

_RELEASES = "v0.2.1 to v0.3.1, main"


TARGETS = (
    Target(
        ("slime",),
        _RELEASES,
        (
            (
                known_compiled(
                    "slime.utils.ppo_utils:compute_approx_kl",
                    "355f0714c5a0e214",
                    slime.compute_approx_kl,
                    _RELEASES,
                ),
            ),
        ),
    ),
)
