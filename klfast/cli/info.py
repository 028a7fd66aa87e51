"""The ``info`` command."""

from __future__ import annotations

import argparse
import json
from typing import Any

from klfast.backends.info import info

HELP = "show versions, the build, and the backend of each device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    facts = info()
    print(json.dumps(facts, indent=2) if arguments.json else text(facts))
    return 0


def text(facts: dict[str, Any]) -> str:
    """The lines of ``klfast info``: "ok" for what works, the reason for what does not."""
    choices = {
        device: {
            "auto": choice["auto"],
            **{name: reason or "ok" for name, reason in choice["why_not"].items()},
        }
        for device, choice in facts["backends"].items()
    }
    return "\n".join(_lines(facts | {"extension": facts["extension"] or "ok", "backends": choices}))


def _lines(facts: dict[str, Any], indent: str = "") -> list[str]:
    """Nested dicts as indented text."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        else:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"{indent}{key}: {shown or '-'}")
    return lines
