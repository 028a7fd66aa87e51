"""Which klfast runs here: its version and the commit of its sources."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from klfast.version import __version__

_PACKAGE = Path(__file__).parent


def build_info() -> dict[str, Any] | None:
    """The record of setup.py; None where nothing was built."""
    path = _PACKAGE / "_build_info.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def commit() -> str | None:
    """The commit that klfast runs from, ``-dirty`` if changed since; None where nothing says it.

    That of the checkout; of an installed package, that which it was built from. ``KLFAST_COMMIT``
    says it where the sources have come without their history.
    """
    return os.environ.get("KLFAST_COMMIT") or _of_checkout() or _of_installed_package()


def described() -> str:
    """Version and commit, such as ``"0.1.0, commit 9d5926d"``."""
    found = commit()
    return f"{__version__}, commit {found}" if found else f"{__version__}, commit not known"


def _of_checkout() -> str | None:
    """None outside of klfast's own: an environment may lie in another project's checkout."""
    if not _git("ls-files", "--error-unmatch", "version.py"):
        return None
    return _git("describe", "--always", "--dirty", "--exclude=*")


def _of_installed_package() -> str | None:
    if (_PACKAGE.parent / "setup.py").exists():
        return None  # sources without history may have changed since the build
    found = (build_info() or {}).get("commit")
    if found is None:
        return None
    commit, *dirty = str(found).split("-")
    return "-".join([commit[:7], *dirty])


def _git(*arguments: str) -> str | None:
    """The output of git in the package's folder; None where it fails, or is not there."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    try:
        done = subprocess.run(command, cwd=_PACKAGE, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
