"""Gives a wheel the tag of the oldest system that has all symbols that the wheel needs.

Run `python release/repair.py WHEEL FOLDER`. With AUDITWHEEL_PLAT=manylinux_2_28_x86_64 a wheel that
needs a newer system is refused. No library is put into the wheel: torch's libraries come with
torch, and every system has the others.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TORCHS = ("libtorch", "libc10")
"""The first letters of the names of torch's libraries."""


def command(wheel: Path, folder: Path) -> list[str]:
    """The command of auditwheel, or of delocate on a Mac."""
    if sys.platform == "darwin":
        excluded = [word for name in TORCHS for word in ("--exclude", name)]
        return ["delocate.cmd.delocate_wheel", *excluded, "--wheel-dir", str(folder), str(wheel)]
    excluded = [word for name in TORCHS for word in ("--exclude", f"{name}*.so")]
    # Without a patcher, auditwheel fails if it would have to put a library into the wheel.
    options = ["--patcher", "none", *excluded, "--wheel-dir", str(folder)]
    return ["auditwheel", "repair", *options, str(wheel)]


def repair(wheel: Path, folder: Path) -> None:
    """Writes the wheel under its new name into the folder."""
    subprocess.run([sys.executable, "-m", *command(wheel, folder)], check=True)


if __name__ == "__main__":
    repair(*map(Path, sys.argv[1:]))
