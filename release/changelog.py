"""Prints the newest section of CHANGELOG.md for the page of a release: `changelog.py v1.2.3`.

It fails if the tag, klfast/version.py and the section do not have the same version.
"""

from __future__ import annotations

import datetime
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1].resolve()
HEADING = re.compile(r"^## \[(?P<version>.+?)\](?: - (?P<date>\S+))?$", re.MULTILINE)


def notes(changelog: str, version: str, tag: str) -> str:
    """The section of this version without its heading. Raises ValueError if it is not the first."""
    if tag != f"v{version}":
        raise ValueError(f"klfast/version.py has {version}, the tag is {tag}")
    newest, *older = HEADING.finditer(changelog)
    if newest["version"] != version:
        raise ValueError(
            f"the first section of CHANGELOG.md must be of {version}, is '{newest[0]}'"
        )
    datetime.date.fromisoformat(newest["date"] or "")
    return changelog[newest.end() : older[0].start() if older else None].strip()


if __name__ == "__main__":
    version = runpy.run_path(str(ROOT / "klfast" / "version.py"))["__version__"]
    try:
        print(notes((ROOT / "CHANGELOG.md").read_text(), version, sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
