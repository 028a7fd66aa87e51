"""The code that ``patch`` replaces: a file per framework, each with its ``TARGETS``.

A fingerprint is ``fingerprints.fingerprint`` of code that klfast was proved equal to. The releases
beside it are those whose code was read; ``patch`` goes by the code alone.
"""

from __future__ import annotations

import importlib

from klfast.compat.patching.sites import Target


def targets_of(framework: str) -> tuple[Target, ...]:
    """A framework's targets; of several the first of which something is known counts."""
    targets: tuple[Target, ...] = importlib.import_module(f"{__name__}.{framework}").TARGETS
    return targets
