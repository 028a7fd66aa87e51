"""The ``study`` subcommand."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from lab.folder import EARLIER, check_writable, set_aside, write_atomic, write_json
from lab.settings import CompareError
from lab.study.candidates import CANDIDATES, MAX_COEF, MIN_COEF
from lab.study.measure import WITHIN, runs_of, study, study_json
from lab.study.plant import fit
from lab.study.records import load_records, read_run
from lab.study.simulate import Course
from lab.study.table import ranked, reading, table

HELP = (
    "put every controller, at its published and at its best gains, on a simulated policy that is "
    "fitted to recorded runs of compare, and write a table and a plot"
)
DEFAULT_OUT = Path("runs/study")
PLOT, TABLE, NUMBERS = "study.png", "study.md", "study.json"
_FILES = (PLOT, TABLE, NUMBERS)
_COURSE = Course()
_COMPARE = "python -m lab compare --arms"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds",
        type=int,
        default=_COURSE.seeds,
        help="runs for each choice of gains (default %(default)s)",
    )
    parser.add_argument(
        "--updates", type=int, default=_COURSE.updates, help="length of a run (default %(default)s)"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=_COURSE.target,
        help="KL to hold, nats per sequence (default %(default)s)",
    )
    parser.add_argument(
        "--jump",
        type=float,
        default=_COURSE.jump,
        help="what the KL is pushed to a multiple of, half-way (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=_COURSE.seed, help="of the noise (default %(default)s)"
    )
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="FOLDER",
        help="fit the plant to this run of python -m lab compare (default: to recorded ones)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        help=f"output folder, for {PLOT}, {TABLE} and {NUMBERS} (default {DEFAULT_OUT})",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="move the files of an earlier study in the output folder to "
        f"{EARLIER}/<date> in it; without this they are refused",
    )
    parser.add_argument(
        "--no-plot",
        dest="plot",
        action="store_false",
        help="leave out the picture, which needs matplotlib",
    )


def run(arguments: argparse.Namespace) -> int:
    """0: finished. 2: a mistake, named on stderr."""
    try:
        _check(arguments)
        _study(arguments)
    except (CompareError, ValueError, OSError) as error:
        print(f"python -m lab study: error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("seeds", 1), ("updates", 60), ("seed", 0)):
        value = getattr(arguments, name)
        if not least <= value < 2**63:
            raise ValueError(f"{name} must be a whole number >= {least}, got {value}")
    for name in ("target", "jump"):
        value = getattr(arguments, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a finite number > 0, got {value}")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "the plot needs matplotlib: pip install 'klfast[demo]', or leave it out (--no-plot)"
        )


def _check_no_study(out: Path) -> None:
    """Raises ValueError where there is an earlier one."""
    earlier = [name for name in _FILES if (out / name).exists()]
    if earlier:
        raise ValueError(
            f"{out} holds an earlier study ({', '.join(earlier)}): move it to {out / EARLIER} "
            "(--force), or choose another folder"
        )


def _study(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    if not arguments.force:
        _check_no_study(out)
    plant = fit(load_records() if arguments.fit is None else read_run(arguments.fit))
    low, high = (plant.held_by(value) for value in (MAX_COEF, MIN_COEF))
    if not low < arguments.target < high:
        raise ValueError(
            f"target must be a KL that the plant can be held at, between {low:.3g} and {high:.3g} "
            f"nats, got {arguments.target}"
        )
    course = Course(
        target=arguments.target,
        updates=arguments.updates,
        seeds=arguments.seeds,
        seed=arguments.seed,
        jump=arguments.jump,
    )
    check_writable(out)
    studied = [study(candidate, plant, course) for candidate in CANDIDATES]
    numbers = study_json(studied, plant, course)
    if (place := set_aside(out, _FILES)) is not None:
        print(f"The earlier study is kept in {place}\n")
    write_json(out / NUMBERS, numbers)
    write_atomic(out / TABLE, table(numbers).encode())
    print(f"Plant: {', '.join(f'{k} {v:.4g}' for k, v in numbers['plant'].items())}\n")
    print(table(numbers))
    for sentence in reading(numbers):
        print(f"- {sentence}")
    if arguments.plot:
        from lab.pictures import draw_study

        runs = {rule.name: runs_of(rule, plant, course) for rule in studied}
        write_atomic(out / PLOT, draw_study(studied, runs, course, WITHIN))
    best = ",".join(rule["name"] for rule in ranked(numbers)[:3])
    print(f"\nThe best three with klfast's default gains on the real experiment: {_COMPARE} {best}")
    print(f"Written to {out}: {', '.join([NUMBERS, TABLE, *([PLOT] if arguments.plot else [])])}")
