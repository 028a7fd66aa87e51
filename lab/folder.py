"""The output folder: whole files only; what others wrote is refused, an earlier run set aside."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lab.lock import LOCK
from lab.settings import CompareError

Row = dict[str, Any]
"""The record of a step, a line of ``METRICS``."""

SETTINGS = "settings.json"
METRICS = "metrics.jsonl"
FRONTIER = "frontier.png"
CURVES = "curves.png"
ESTIMATORS = "estimators.png"
SAMPLER = "sampler.png"
SPEED = "speed.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
EARLIER = "earlier"
_RECORD = {"version", "settings", "environment"}  # keys of the file of settings

PICTURES = (FRONTIER, CURVES, ESTIMATORS, SAMPLER)
_OURS = (METRICS, *PICTURES, SPEED, REPORT, CHECKPOINTS, SETTINGS)
_TEMPORARY = (".writable.", *(f".{name}." for name in _OURS))  # left behind by kill -9


def write_atomic(path: Path, data: bytes) -> None:
    """Writes the whole file or leaves the old one: no reader and no crash ever sees half of it.

    The data are on the disk before the file takes its name, and the name before this returns.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """The names in a folder onto the disk, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse
            os.fsync(handle)
    finally:
        os.close(handle)


def remove_temporary(out: Path) -> None:
    """Removes what a killed process has begun to write; for the holder of the folder's lock."""
    begun = [path for path in out.iterdir() if path.name.startswith(_TEMPORARY)]
    begun += (out / CHECKPOINTS).glob(".*.pt.*")
    for path in begun:
        path.unlink(missing_ok=True)


def check_writable(out: Path) -> None:
    """Makes the folder, and raises :class:`CompareError` unless files can be written in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out, prefix=".writable."):
            pass
    except OSError as error:
        raise CompareError(f"cannot write to the output folder {out}: {error.strerror}") from None


def check_ours(out: Path) -> None:
    """Raises :class:`CompareError` for a folder with files, but none of klfast's settings."""
    try:
        names = sorted(path.name for path in out.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise CompareError(f"cannot write to the output folder {out}: {error.strerror}") from None
    if SETTINGS in names:
        foreign = None if _is_ours(out / SETTINGS) else SETTINGS
    else:
        others = (n for n in names if n not in (LOCK, EARLIER) and not n.startswith(_TEMPORARY))
        foreign = next(others, None)
    if foreign is not None:
        raise CompareError(
            f"{out} is no folder of python -m lab compare, which did not write its {foreign}; "
            "choose a new or an empty folder"
        )


def check_no_run(out: Path) -> None:
    """Raises :class:`CompareError` where there is an earlier run."""
    if (out / SETTINGS).exists():
        raise CompareError(
            f"{out} holds an earlier run: go on with it (--resume), move it to {out / EARLIER} and "
            "begin anew (--force), or choose another folder"
        )


def _is_ours(settings: Path) -> bool:
    try:
        record = json.loads(settings.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.keys() >= _RECORD


def set_aside(out: Path, names: Sequence[str] = _OURS) -> Path | None:
    """Moves an earlier run's files to ``earlier/<date>``; returns where, or None without any.

    The file of settings goes last: until then the folder is known as that of a run.
    """
    present = [out / name for name in names if (out / name).exists()]
    if not present:
        return None
    stem = time.strftime("%Y%m%d-%H%M%S", time.localtime(max(p.stat().st_mtime for p in present)))
    place = out / EARLIER / stem
    count = 1
    while place.exists():
        count += 1
        place = out / EARLIER / f"{stem}-{count}"
    place.mkdir(parents=True)
    for path in present:
        path.rename(place / path.name)
    return place


def write_json(path: Path, value: object) -> None:
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """The content that :func:`write_json` wrote; None without it."""
    return json.loads(path.read_bytes()) if path.exists() else None


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that were written, up to a line that is not whole; none without the file."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        with contextlib.suppress(ValueError):
            rows.extend(json.loads(line) for line in path.read_bytes().splitlines())
    return rows


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Adds one line in one write, so that a file cut off by a crash still ends on a whole line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    if not path.parent.exists():
        path.parent.mkdir()
        _sync(path.parent.parent)
    write_atomic(path, buffer.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state that :func:`save_checkpoint` wrote; ValueError if a bit has changed since."""
    data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()  # torch.load itself does not look at the checksums
        if damaged is not None:
            raise ValueError(f"checksum mismatch in {damaged}")
        state = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(first_line) from None
    if not isinstance(state, dict):
        raise ValueError("not a checkpoint of this experiment")
    return state
