"""The ``compare`` subcommand: its options, and how it ends."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from lab import folder
from lab.settings import (
    ARM_NAMES,
    DEFAULT_ARMS,
    CompareError,
    LeadersError,
    Settings,
)
from lab.team import PARALLEL, TIMEOUT

HELP = (
    "train a small language model under different KL controls, measure the KL estimators against "
    "the exact KL on the way, and write a report"
)
DEFAULT_OUT = Path("runs/compare")

_FILES = (folder.REPORT, *folder.PICTURES, folder.METRICS)
_DEFAULTS = Settings()
# option, setting, type, what it is
_OPTIONS = (
    ("--steps", "steps", int, "policy-gradient steps of each arm"),
    ("--seed", "seed", int, "seed of everything random"),
    ("--target", "target", float, "KL that the steering arms aim at, nats per sequence"),
    ("--letter", "letter", str, "letter whose share is the reward"),
    ("--low", "low_coef", float, "coefficient of the arm fixed-low"),
    ("--high", "high_coef", float, "coefficient of the arm fixed-high"),
    ("--init", "init_coef", float, "coefficient that the steering arms begin with"),
    ("--horizon", "horizon", float, "horizon of the adaptive rule, in sequences"),
    ("--gain", "gain", float, "gain of the exponential rule, per target missed and step"),
    ("--clip", "clip", float, "log-ratio clip of the penalty, in nats; 0 for none"),
    ("--staleness", "staleness", int, "steps between two updates of a stale sampler's weights"),
    ("--correction", "correction", str, "preset of klfast.rollout_correction, arm corrected"),
    ("--learning-rate", "learning_rate", float, "of the policy"),
    ("--precision", "precision", str, "float32 or float64, of weights and arithmetic"),
    ("--pretrain-steps", "pretrain_steps", int, "language-model steps that make the reference"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, name, kind, text in _OPTIONS:
        parser.add_argument(
            option,
            dest=name,
            type=kind,
            default=argparse.SUPPRESS,
            help=f"{text} (default {getattr(_DEFAULTS, name)})",
        )
    parser.add_argument(
        "--arms",
        type=_names,
        default=argparse.SUPPRESS,
        metavar="A,B,...",
        help=f"arms to run, of {', '.join(ARM_NAMES)} (default {','.join(DEFAULT_ARMS)})",
    )
    parser.add_argument(
        "--out",
        type=_folder,
        default=DEFAULT_OUT,
        help=f"output folder, for {', '.join(_FILES)} (default {DEFAULT_OUT})",
    )
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume", action="store_true", help="go on with the interrupted run in the output folder"
    )
    earlier.add_argument(
        "--force",
        action="store_true",
        help="begin anew in the folder of an earlier run, which is moved to "
        f"{folder.EARLIER}/<date> in it; without this it is refused",
    )
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="what trains the policy on the processes that torchrun starts (default ddp)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        help="seconds that those processes wait for one that does not answer (default %(default)g)",
    )
    parser.add_argument(
        "--no-bench", dest="bench", action="store_false", help="leave out the closing speed table"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must name a folder, got ''")
    return Path(text)


def run(arguments: argparse.Namespace) -> int:
    """0: finished. 130: interrupted, what was done is reported. 2: a mistake, named on stderr."""
    from lab.compare import Options, compare

    known = {name for _, name, _, _ in _OPTIONS} | {"arms"}
    options = Options(
        chosen={name: value for name, value in vars(arguments).items() if name in known},
        out=arguments.out,
        resume=arguments.resume,
        force=arguments.force,
        bench=arguments.bench,
        parallel=arguments.parallel,
        timeout=arguments.timeout,
    )
    try:
        return 0 if compare(options) else 130
    except (CompareError, OSError) as error:
        if not isinstance(error, LeadersError):
            rank = os.environ.get("RANK", "0")
            where = "" if rank == "0" else f" on rank {rank}"
            print(f"python -m lab compare: error{where}: {error}", file=sys.stderr)
        return 2
