"""The shape of what ``patch`` knows of a framework: targets, groups and sites."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

Fused = Callable[[ModuleType], str | None]
"""The module of a site -> what its code does on a GPU, a verb phrase, where it is fused there."""

INSIDE = "inside"
"""In place of a fingerprint: ``Site.new`` itself looks for the code that it replaces."""


class Site(NamedTuple):
    """One function, class, method or constant of a framework, of one or several known codes."""

    where: str  # "package.module:Class.method"
    # Fingerprint (of a constant its ``repr``; or ``INSIDE``) -> the releases that have it.
    codes: Mapping[str, str]
    # klfast's in its place, or a ``Make`` of it. None: the code is fingerprinted only, because the
    # replaced code of the group depends on it.
    new: Any = None
    fused: Fused | None = None  # if it says what the code does on a GPU, the site is left there
    # Which known releases or installations lack it, None for none. Where it is absent for this
    # reason, the site is left alone, ``strict`` or not.
    absent: str | None = None


Group = tuple[Site, ...]
"""Sites that are replaced together or not at all, with the callees they were proved equal with.

Several with one ``where`` are one place, whose codes have different replacements."""


Target = tuple[Group, ...]
"""The sites of a framework, or of an era of it that shares few with another."""


def is_there(package: str) -> bool:
    """A package is imported or could be; a stub without a spec counts as imported."""
    # ``find_spec`` raises ValueError for a module without a spec, such as a stub of a test.
    if sys.modules.get(package) is not None:
        return True
    return importlib.util.find_spec(package) is not None


def is_within(module: str, package: str) -> bool:
    """True for the package itself, and for a module at any depth in it."""
    return f"{module}.".startswith(f"{package}.")


def versioned(framework: str) -> str:
    """The framework's name, with its version if it was installed as a distribution."""
    try:
        return f"{framework} {metadata.version(framework)}"
    except metadata.PackageNotFoundError:
        return framework
