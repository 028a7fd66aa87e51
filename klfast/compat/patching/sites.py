"""The shape of what ``patch`` knows of a framework: targets, groups, sites and known codes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import NamedTuple

from klfast.compat.patching.replacements import Make, replacement, replacement_of_compiled

Fused = Callable[[ModuleType], str | None]
"""The module of a site -> why its own code is left alone on a GPU, where it is fused there."""


class KnownCode(NamedTuple):
    """Code that a site is known to have, and its replacement.

    Attributes:
        code: its fingerprint (of a constant: its ``repr``); None where ``make`` itself looks for
            the code that it replaces.
        releases: the releases that have it, for messages.
        make: from the framework's object to its replacement. None: the code is fingerprinted only,
            because the replaced code depends on it.
        fused: called where there is a GPU; if it returns a reason, the site is left alone.
    """

    code: str | None
    releases: str
    make: Make | None = None
    fused: Fused | None = None


class Site(NamedTuple):
    """One function, class, method or constant of a framework.

    Attributes:
        where: ``"package.module:Class.method"``.
        known: the codes that it is known to have in one release or another.
        absent: which of the known releases or installations lack it, for messages; None: none.
            Where it is absent so, it is left alone, ``strict`` or not.
    """

    where: str
    known: tuple[KnownCode, ...]
    absent: str | None = None


Group = tuple[Site, ...]
"""Sites that are replaced together or not at all, with the callees they were proved equal with."""


Target = tuple[Group, ...]
"""The sites of a framework, or of an era of it that shares few with another."""


def known(where: str, code: str, new: object, releases: str, *, fused: Fused | None = None) -> Site:
    """A function or class of one known code, and klfast's in its place."""
    return Site(where, (KnownCode(code, releases, replacement(new), fused),))


def left_on_gpu(what: str) -> str:
    """Why code is left alone where there is a GPU; ``what`` it does there is a verb phrase."""
    return f"on a GPU it {what}; no measurement shows klfast to be faster"


def compiled(module: ModuleType) -> str:
    """``Fused`` of a function that always runs under ``torch.compile``."""
    return left_on_gpu("runs under torch.compile")


def flash_attn(calls_it: Callable[[ModuleType], bool]) -> Fused:
    """``Fused`` of a function that calls flash-attn's cross entropy where the module says so."""

    def fused(module: ModuleType) -> str | None:
        return left_on_gpu("calls flash-attn's cross entropy") if calls_it(module) else None

    return fused


def known_compiled(where: str, code: str, new: object, releases: str) -> Site:
    """A function that ``torch.compile`` decorates; ``code`` is its own, and klfast's in place."""
    return Site(where, (KnownCode(None, releases, replacement_of_compiled(new, code), compiled),))


def is_there(package: str) -> bool:
    """A package is imported or could be; a stub without a spec counts as imported."""
    if sys.modules.get(package) is not None:
        return True
    return importlib.util.find_spec(package) is not None


def versioned(framework: str) -> str:
    """The framework's name, with its version if it was installed as a distribution."""
    try:
        return f"{framework} {metadata.version(framework)}"
    except metadata.PackageNotFoundError:
        return framework


def stays(where: str, code: str, releases: str) -> Site:
    """A function that a replaced one of the same group calls: it was proved equal with this one."""
    return Site(where, (KnownCode(code, releases),))
