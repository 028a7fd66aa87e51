"""The shape of what ``patch`` knows of a framework: targets, groups, sites and forms."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from klfast.compat.replacements import Make, replacement

Fused = Callable[[ModuleType], str | None]
"""The module of a site -> the name of the fused GPU kernel that its own code calls, if it does."""


class Form(NamedTuple):
    """One code that a site is known to have, and what takes its place.

    Attributes:
        code: its fingerprint (of a constant: its ``repr``); None where ``make`` itself looks for
            the code that it replaces.
        releases: which releases have it, for messages.
        make: from the framework's object to its replacement; None for code that stays, but that
            what is replaced was proved equal with.
        fused: asked where there is a GPU; if it names a kernel, the site is left alone.
    """

    code: str | None
    releases: str
    make: Make | None = None
    fused: Fused | None = None


class Site(NamedTuple):
    """One function, class, method or constant of a framework.

    Attributes:
        where: ``"package.module:Class.method"``.
        forms: the codes that it is known to have in one release or another.
    """

    where: str
    forms: tuple[Form, ...]


Group = tuple[Site, ...]
"""Sites that are replaced together or not at all, with the callees they were proved equal with."""


class Target(NamedTuple):
    """A framework, or an era of it that shares few sites with another.

    Attributes:
        packages: its own top-level packages; the first is the one that must be installed.
        releases: those that are known, for messages.
        groups: what is replaced.
        exact: whether any of the replacements has an ``exact``.
        distribution: the name under which it is installed, if not that of the first package.
    """

    packages: tuple[str, ...]
    releases: str
    groups: tuple[Group, ...]
    exact: bool = False
    distribution: str | None = None


def known(where: str, code: str, new: object, releases: str, *, fused: Fused | None = None) -> Site:
    """A function or class of one known code, and klfast's in its place."""
    return Site(where, (Form(code, releases, replacement(new), fused),))


def stays(where: str, code: str, releases: str) -> Site:
    """What a replaced function of the same group calls, and was proved equal with."""
    return Site(where, (Form(code, releases),))
