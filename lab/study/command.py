"""The ``study`` subcommand."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

from lab.run import EARLIER, check_writable, set_aside, write, write_json
from lab.settings import CompareError
from lab.study.candidates import CANDIDATES, MAX_COEF, MIN_COEF
from lab.study.plant import fit, load_records, read_run
from lab.study.simulate import WITHIN, Course, runs_of, study, study_json
from lab.study.table import ranked, reading, table

HELP = (
    "run every controller, with its published and its best gains, on a simulated policy that is "
    "fitted to recorded runs of compare, and write a table and a plot"
)
DEFAULT_OUT = Path("runs/study")
PLOT, TABLE, NUMBERS = _FILES = ("study.png", "study.md", "study.json")
_COURSE = Course()
# setting of the course, help, the least whole number (or None for any number > 0)
_OPTIONS = (
    ("seeds", "runs for each choice of gains", 1),
    ("updates", "updates in a run", 60),
    ("seed", "seed of the noise", 0),
    ("target", "target KL, in nats per sequence", None),
    ("jump", "from half-way on, a coefficient leads to this many times the KL", None),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text, least in _OPTIONS:
        parser.add_argument(
            f"--{name}",
            type=float if least is None else int,
            default=getattr(_COURSE, name),
            help=f"{text} (default %(default)s)",
        )
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="FOLDER",
        help="fit the simulated policy to this run of lab compare (default: recorded runs)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        help=f"output folder, for {', '.join(_FILES)} (default {DEFAULT_OUT})",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="write to the folder of an earlier study, whose files are moved to its "
        f"{EARLIER}/<date>; without this the folder is refused",
    )
    parser.add_argument(
        "--no-plot",
        dest="plot",
        action="store_false",
        help="leave out the plot, which needs matplotlib",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if finished, 2 on a mistake (see stderr)."""
    try:
        _study(arguments)
    except (CompareError, ValueError, OSError) as error:
        print(f"python -m lab study: error: {error}", file=sys.stderr)
        return 2
    return 0


def _course(arguments: argparse.Namespace) -> Course:
    chosen = {name: getattr(arguments, name) for name, _, _ in _OPTIONS}
    for name, _, least in _OPTIONS:
        if least is not None and not least <= chosen[name] < 2**63:
            raise ValueError(f"{name} must be a whole number >= {least}, got {chosen[name]}")
        if least is None and not 0 < chosen[name] < float("inf"):
            raise ValueError(f"{name} must be a finite number > 0, got {chosen[name]}")
    return replace(_COURSE, **chosen)


def _study(arguments: argparse.Namespace) -> None:
    out, course = arguments.out, _course(arguments)
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "the plot needs matplotlib: pip install 'klfast[demo]', or leave it out (--no-plot)"
        )
    earlier = [name for name in _FILES if (out / name).exists()]
    if earlier and not arguments.force:
        raise ValueError(
            f"{out} holds an earlier study ({', '.join(earlier)}): move it to {out / EARLIER} "
            "(--force), or choose another folder"
        )
    plant = fit(load_records() if arguments.fit is None else read_run(arguments.fit))
    low, high = (plant.held_by(value) for value in (MAX_COEF, MIN_COEF))
    if not low < course.target < high:
        raise ValueError(
            f"target must be a KL that the simulated policy can reach, between {low:.3g} and "
            f"{high:.3g} nats, got {course.target}"
        )
    check_writable(out)
    studied = [study(candidate, plant, course) for candidate in CANDIDATES]
    numbers = study_json(studied, plant, course)
    if (place := set_aside(out, _FILES)) is not None:
        print(f"The earlier study is kept in {place}\n")
    write_json(out / NUMBERS, numbers)
    write(out / TABLE, table(numbers).encode())
    print(f"Plant: {', '.join(f'{k} {v:.4g}' for k, v in numbers['plant'].items())}\n")
    print(table(numbers))
    for sentence in reading(numbers):
        print(f"- {sentence}")
    if arguments.plot:
        from lab.pictures import draw_study

        runs = {rule.name: runs_of(rule, plant, course) for rule in studied}
        write(out / PLOT, draw_study(studied, runs, course, WITHIN))
    best = ",".join(rule["name"] for rule in ranked(numbers)[:3])
    print(
        "\nThe best three with klfast's default gains on the real experiment: python -m lab "
        f"compare --arms {best}"
    )
    print(f"Written to {out}: {', '.join(name for name in _FILES if (out / name).exists())}")
