"""Gives a wheel its platform's tag: the oldest system whose symbols it gets by with.

`python release/repair.py WHEEL FOLDER`. AUDITWHEEL_PLAT=manylinux_2_28_x86_64 refuses a wheel that
needs a newer one. Nothing is put into the wheel: torch's libraries come with torch, and it needs no
others that a system may lack.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TORCHS = ("libtorch", "libc10")
"""How the names of torch's libraries begin."""


def command(wheel: Path, folder: Path) -> list[str]:
    """auditwheel's, or delocate's on a Mac."""
    if sys.platform == "darwin":
        excluded = [word for name in TORCHS for word in ("--exclude", name)]
        return ["delocate.cmd.delocate_wheel", *excluded, "--wheel-dir", str(folder), str(wheel)]
    excluded = [word for name in TORCHS for word in ("--exclude", f"{name}*.so")]
    # Without a patcher, auditwheel fails where it would have to put a library into the wheel.
    options = ["--patcher", "none", *excluded, "--wheel-dir", str(folder)]
    return ["auditwheel", "repair", *options, str(wheel)]


def repair(wheel: Path, folder: Path) -> None:
    """Writes the wheel under its new name into the folder."""
    subprocess.run([sys.executable, "-m", *command(wheel, folder)], check=True)


if __name__ == "__main__":
    repair(*map(Path, sys.argv[1:]))
