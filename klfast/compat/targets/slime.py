"""slime, whose releases are git tags: v0.2.1 to v0.3.1 and its main branch of August 2026."""

from __future__ import annotations

from types import ModuleType

from klfast.compat import slime
from klfast.compat.replacements import replacement_of_compiled
from klfast.compat.sites import Form, Site, Target

_RELEASES = "v0.2.1 to v0.3.1, main"


def _compiled(module: ModuleType) -> str:
    return "what torch.compile makes of it"


TARGETS = (
    Target(
        ("slime",),
        _RELEASES,
        (
            (
                Site(
                    "slime.utils.ppo_utils:compute_approx_kl",
                    (
                        Form(
                            None,
                            _RELEASES,
                            replacement_of_compiled(slime.compute_approx_kl, "355f0714c5a0e214"),
                            _compiled,
                        ),
                    ),
                ),
            ),
        ),
    ),
)
