"""The frameworks that ``klfast.compat`` has the KL code of: a row each.

``patch``, the pages of the site and the tests read this table. DESIGN.md's recipe for a framework
says which files belong to a row.
"""

from __future__ import annotations

from typing import NamedTuple


class Framework(NamedTuple):
    """A framework; its functions are in ``klfast/compat/<name>.py``.

    Attributes:
        title: its name as its authors write it.
        package: its own top-level package, which must be installed for a patch.
        releases: those whose code was read. Those with a v are git tags.
        is_patched: whether ``patch`` serves it, by ``klfast/compat/targets/<name>.py``. Only code
            that was met in a real package is replaced; functions of the others are imported.
    """

    title: str
    package: str
    releases: str
    is_patched: bool


FRAMEWORKS = {
    "trlx": Framework("trlx", "trlx", "v0.6.0, v0.7.0, main", True),
    "trl": Framework("TRL", "trl", "1.10 to 1.16, 0.6 to 0.11 (PPO)", True),
    "verl": Framework("verl", "verl", "0.6 to 0.9, main", True),
    "openrlhf": Framework("OpenRLHF", "openrlhf", "0.10 to 0.11.2, main", True),
    "roll": Framework("ROLL", "roll", "v0.1.0 to v0.3.0, main", True),
    "skyrl": Framework("SkyRL", "skyrl", "0.1 to 0.3, main", True),
    "ms_swift": Framework("ms-swift", "swift", "4.3 to 4.6, main", True),
    "liger": Framework("Liger", "liger_kernel", "0.8", False),
}
"""By the name of its module in ``klfast.compat``."""

PATCHED = tuple(name for name, framework in FRAMEWORKS.items() if framework.is_patched)
"""The names that ``patch`` takes."""
