"""The file of a benchmark's results, which appears only if they may be published."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Output:
    """A JSON file that is written after every case, as a benchmark that is stopped from outside has
    no end to write at.
    """

    def __init__(self, path: Path):
        self.path = path
        self._earlier = path.read_bytes() if path.exists() else None

    def write(self, data: dict[str, Any]) -> None:
        self.path.write_text(json.dumps(data, indent=2) + "\n")

    def withdraw(self) -> None:
        """Makes the file again what it was before the run."""
        if self._earlier is not None:
            self.path.write_bytes(self._earlier)
        else:
            self.path.unlink(missing_ok=True)


def cannot_write(path: Path) -> str | None:
    """Why a file cannot be written, before there is anything to write; None if it can."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    return None
