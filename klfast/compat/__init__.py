"""Drop-in replacements for the KL penalty code of trlx, TRL, verl, OpenRLHF and ROLL.

``klfast.compat.<framework>`` has functions and classes with the framework's own names, argument
names and return shapes; ``patch("<framework>")`` puts them into the installed framework. Values
are the framework's own, but for rounding, in which klfast keeps more digits; each docstring names
what differs, which are faults for the most part (NaN let through masks, NaN gradients, a
controller that can be poisoned), and what ``exact=True`` takes back of that.
"""

from __future__ import annotations

from klfast.checks import check_choice
from klfast.compat import openrlhf, patching, presets, roll, trl, trlx, verl
from klfast.compat.patching import Patch, PatchError, Target
from klfast.compat.targets import TARGETS

__all__ = [
    "Patch",
    "PatchError",
    "openrlhf",
    "patch",
    "presets",
    "roll",
    "trl",
    "trlx",
    "unpatch",
    "verl",
]

FRAMEWORKS = tuple(TARGETS)


def patch(framework: str, *, exact: bool = False) -> Patch:
    """Put klfast's KL code in the place of an installed framework's own, in this process.

    Every module that imported what is replaced by name gets the replacement too. It holds until
    ``unpatch(framework)``, or as a context manager (``with klfast.compat.patch("verl"): ...``)
    until the end of the block. Worker processes need a call of their own, in Ray for example
    ``ray.init(runtime_env={"worker_process_setup_hook": ...})``.

    Args:
        framework: ``"trl"``, ``"verl"``, ``"openrlhf"``, ``"roll"`` or ``"trlx"``.
        exact: give it to the replacements that have one: the framework's dtypes and faults too.

    Returns:
        The patch: a context manager whose repr says what it replaced.

    Raises:
        PatchError: the framework is not installed, does not import or is already patched; or its
            version, or the code in any of the places, is not what klfast was proved equal to; or
            ``exact`` is asked of replacements none of which has it. Nothing is changed.
        ValueError, TypeError: an unknown framework.
    """
    return patching.apply(framework, _targets(framework), exact)


def unpatch(framework: str) -> None:
    """Put a framework's own code back, also where it was imported by name since.

    Raises:
        PatchError: it is not patched.
        ValueError, TypeError: an unknown framework.
    """
    _targets(framework)
    patching.undo(framework)


def _targets(framework: str) -> tuple[Target, ...]:
    check_choice("framework", framework, FRAMEWORKS)
    return TARGETS[framework]
