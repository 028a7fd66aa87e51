"""The installed versions, the commit, and the backend that serves each device."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from klfast import backends
from klfast.ops import load
from klfast.types.device import DEVICES
from klfast.version import __version__

_PACKAGE = Path(__file__).parents[1]


def info() -> dict[str, Any]:
    """Versions, build and backends as plain data, readable even where the extension does not load.

    Returns:
        ``versions``: klfast, torch, its CUDA (or None), triton (or None), python. ``build``: what
        setup.py recorded (torch, CUDA, architectures, flags, commit), or None. ``extension``: None
        if it loaded, else why not. ``cpu``: the instruction set in use, the error of a wrong
        ``KLFAST_CPU``, or None. ``devices``: name and compute capability of each GPU. ``backends``
        has two entries for each kind of device.
        ``auto`` is the name of the chosen backend. ``why_not`` holds, for each backend, None or
        why it cannot serve the device. ``first_use`` has an entry for each GPU that ``native`` can
        serve. It holds the outcome of the self-test for each family of kernels: "ok",
        "failed: ..." (the family serves no call there), "unchecked", or "off"
        (``KLFAST_SELF_CHECK=0``).
    """
    error = load.load_error()
    gpus = [
        torch.device(name, index)
        for name, row in DEVICES.items()
        for index in range(row.module.device_count() if row.triton else 0)
    ]
    devices = {str(device): device for device in (torch.device("cpu"), *gpus)}
    first_use = {name: backends.first_use(device) for name, device in devices.items()}
    return {
        "versions": {
            "klfast": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": next((d.version for d in metadata.distributions(name="triton")), None),
            "python": platform.python_version(),
        },
        "build": build_info(),
        "extension": error,
        "cpu": None if error else _instruction_set(),
        "devices": {str(device): _gpu(device) for device in gpus},
        "backends": {
            name: {
                "auto": backends.first_available(backends.why_not(device), device),
                "why_not": why_not(device),
            }
            for name, device in devices.items()
        },
        "first_use": {name: known for name, known in first_use.items() if known},
    }


def _instruction_set() -> str | None:
    extension = load.extension()
    return cpu_error() or (None if extension is None else str(extension.instruction_set()))


def _gpu(device: torch.device) -> dict[str, str | None]:
    module = DEVICES[device.type].module
    found = module.get_device_capability(device.index)  # of CUDA a pair, of Intel's GPUs a dict
    capability = ".".join(map(str, found)) if isinstance(found, tuple) else None
    return {"name": module.get_device_name(device.index), "capability": capability}


def cpu_error() -> str | None:
    """The error of native calls on a CPU if KLFAST_CPU names no instruction set that is here."""
    extension = load.extension()
    try:
        if extension is not None:
            extension.instruction_set()
    except RuntimeError as error:
        return str(error)
    return None


def why_not(device: torch.device) -> dict[str, str | None]:
    """``backends.why_not``, and ``cpu_error``, which ``auto`` does not avoid by another backend."""
    reasons = backends.why_not(device)
    if device.type == "cpu" and reasons["native"] is None:
        reasons["native"] = cpu_error()
    return reasons


def build_info() -> dict[str, Any] | None:
    """The record of setup.py; None where nothing was built."""
    path = _PACKAGE / "_build_info.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def described() -> str:
    """Version and commit, such as ``"0.1.0, commit 9d5926d"``."""
    return f"{__version__}, commit {commit() or 'not known'}"


def commit() -> str | None:
    """The commit that klfast runs from, ``-dirty`` if changed since; None where nothing says it.

    ``KLFAST_COMMIT`` says it where the sources have come without their history. A checkout has its
    own, and an installed package the commit that it was built from.
    """
    return os.environ.get("KLFAST_COMMIT") or _of_checkout() or _of_installed_package()


def _of_checkout() -> str | None:
    """None outside of klfast's own: an environment may lie in another project's checkout."""
    if not _git("ls-files", "--error-unmatch", "version.py"):
        return None
    return _git("describe", "--always", "--dirty", "--exclude=*")


def _of_installed_package() -> str | None:
    if (_PACKAGE.parent / "setup.py").exists():
        return None  # sources without history may have changed since the build
    found, *dirty = str((build_info() or {}).get("commit") or "").split("-")
    return "-".join([found[:7], *dirty]) or None


def _git(*arguments: str) -> str | None:
    """The output of git in the package's folder; None where it fails, or is not there."""
    # A container often runs as another user than the checkout's owner, which git refuses.
    command = ["git", "-c", "safe.directory=*", *arguments]
    try:
        done = subprocess.run(command, cwd=_PACKAGE, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
