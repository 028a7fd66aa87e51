"""The report of a patch, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Replaced(NamedTuple):
    """One function, class or method that is klfast's now.

    Attributes:
        where: ``"package.module:Class.method"``.
        releases: which releases have the code that was found there.
        modules: the other modules that had imported it by name and got the replacement too.
    """

    where: str
    releases: str
    modules: tuple[str, ...]

    def __str__(self) -> str:
        also = f" (also in {', '.join(self.modules)})" if self.modules else ""
        return f"{self.where}{also}"


class Left(NamedTuple):
    """One that is not, and why.

    Attributes:
        where: ``"package.module:name"``.
        reason: a sentence without its full stop.
    """

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def report(framework: str, replaced: Sequence[Replaced], left: Sequence[Left]) -> str:
    """``framework`` and a line for each place."""
    lines = [f"klfast in {framework}"]
    lines += [f"  replaced  {each}" for each in replaced]
    lines += [f"  left      {each}" for each in left]
    return "\n".join(lines)
