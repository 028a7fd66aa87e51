"""The ``study`` subcommand."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

from lab.study.plant import fit, load_records
from lab.study.simulate import CANDIDATES, WITHIN, Course, runs_of, study, study_json
from lab.study.table import ranked, reading, table

HELP = (
    "run every controller, with its published and its best gains, on a simulated policy that is "
    "fitted to recorded runs of compare, and write a table and a plot"
)
PLOT, TABLE, NUMBERS = FILES = ("study.png", "study.md", "study.json")
_COURSE = Course()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in (
        ("seeds", "runs for each choice of gains"),
        ("updates", "updates in a run, at least 60"),
    ):
        default = getattr(_COURSE, name)
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/study"),
        help=f"a new output folder, for {', '.join(FILES)} (default %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if finished, 2 on a mistake (see stderr)."""
    try:
        _study(arguments.out, arguments.seeds, arguments.updates)
    except (ValueError, OSError) as error:
        print(f"python -m lab study: error: {error}", file=sys.stderr)
        return 2
    return 0


def _study(out: Path, seeds: int, updates: int) -> None:
    for name, value, least in (("seeds", seeds, 1), ("updates", updates, 60)):
        if value < least:
            raise ValueError(f"{name} must be a whole number >= {least}, got {value}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the study needs matplotlib: pip install 'klfast[demo]'")
    from lab.pictures import draw_study

    earlier = [name for name in FILES if (out / name).exists()]
    if earlier:
        raise ValueError(
            f"{out} holds an earlier study ({', '.join(earlier)}): move it, or choose another "
            "folder (--out)"
        )
    out.mkdir(parents=True, exist_ok=True)
    course, plant = replace(_COURSE, seeds=seeds, updates=updates), fit(load_records())
    studied = [study(candidate, plant, course) for candidate in CANDIDATES]
    numbers = study_json(studied, plant, course)
    runs = {rule.name: runs_of(rule, plant, course) for rule in studied}
    (out / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")
    (out / TABLE).write_text(f"{table(numbers)}\n")
    (out / PLOT).write_bytes(draw_study(studied, runs, course, WITHIN))
    print(f"Plant: {', '.join(f'{k} {v:.4g}' for k, v in numbers['plant'].items())}\n")
    print(f"{table(numbers)}\n")
    for sentence in reading(numbers):
        print(f"- {sentence}")
    best = ",".join(rule["name"] for rule in ranked(numbers)[:3])
    print(
        "\nThe best three with klfast's default gains on the real experiment: python -m lab "
        f"compare --arms {best}"
    )
    print(f"Written to {out}: {', '.join(FILES)}")
