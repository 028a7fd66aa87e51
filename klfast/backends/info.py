"""The installed versions, and the backend that serves each device."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any

import torch

from klfast import backends
from klfast.ops import load
from klfast.provenance import build_info
from klfast.version import __version__

HELP = "versions, build, and which backend serves which device"


def info() -> dict[str, Any]:
    """Versions, build and backends as plain data, readable even where the extension does not load.

    Returns:
        ``versions``: klfast, torch, its CUDA (or None), triton (or None), python. ``build``: what
        setup.py recorded (torch, CUDA, architectures, flags, commit), or None. ``extension``: None
        if it loaded, else why not. ``cpu``: the instruction set in use, or None. ``devices``: name
        and compute capability of each GPU. ``backends``: for each kind of device, ``auto``: the
        backend's name, and ``why_not``: for each backend, None or why it cannot serve the device.
        ``first_use``: for each GPU that ``native`` can serve, what this process knows of each
        family of its kernels from the known answers before their first use: "ok", "failed: ..."
        (the family serves no call there), "unchecked", or "off" (``KLFAST_SELF_CHECK=0``).
    """
    error = load.load_error()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    devices = ["cpu", *(f"cuda:{index}" for index in gpus)]
    return {
        "versions": {
            "klfast": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _version("triton"),
            "python": platform.python_version(),
        },
        "build": build_info(),
        "extension": error,
        "cpu": None if error else _instruction_set(),
        "devices": {f"cuda:{index}": _gpu(index) for index in gpus},
        "backends": {device: _choice(torch.device(device)) for device in devices},
        "first_use": {device: known for device in devices if (known := _first_use(device))},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, str]:
    major, minor = torch.cuda.get_device_capability(index)
    return {"name": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"}


def _instruction_set() -> str:
    from klfast import _C

    try:
        return _C.instruction_set()
    except RuntimeError as error:  # KLFAST_CPU asks for what is not here
        return str(error)


def _first_use(device: str) -> dict[str, str]:
    return backends.first_use(torch.device(device))


def _choice(device: torch.device) -> dict[str, Any]:
    why_not = backends.why_not(device)
    return {"auto": backends.first_available(why_not), "why_not": why_not}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``klfast info``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print ``info()``."""
    facts = info()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print(text(facts))
    return 0


def text(facts: dict[str, Any]) -> str:
    """The lines of ``klfast info``."""
    return "\n".join(_lines(_in_words(facts)))


def _in_words(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts as text shows them: "ok" for what works, the reason for what does not."""
    return {
        **facts,
        "extension": facts["extension"] or "ok",
        "backends": {
            device: {
                "auto": choice["auto"],
                **{name: reason or "ok" for name, reason in choice["why_not"].items()},
            }
            for device, choice in facts["backends"].items()
        },
    }


def _lines(facts: Any, indent: str = "") -> list[str]:
    """Nested dicts as indented text."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        else:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"{indent}{key}: {shown or '-'}")
    return lines
