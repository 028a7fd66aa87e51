"""The ``bench`` subcommand: its options, the loop over the cases, and how it ends."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from klfast.bench.cases import DTYPES, OPS, Case
from klfast.bench.check import WrongResult
from klfast.bench.measure import ROUNDS, Plan, Skip, measure
from klfast.bench.progress import Begin, progress
from klfast.bench.report import Results, conditions, print_results, to_json

HELP = "time klfast against eager PyTorch and torch.compile on this machine"

SHAPES = ((512, 8192), (4096, 16384), (4, 64))
QUICK_SHAPES = ((16, 256),)
QUICK_ROUNDS = 3

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = ",".join(f"{rows}x{columns}" for rows, columns in SHAPES)
    parser.add_argument(
        "--shapes",
        type=_list_of(_shape),
        metavar="BxT,...",
        help=f"sequences x tokens (default {shapes})",
    )
    for option, names, text in (
        ("--dtypes", tuple(DTYPES), "of the log-probs"),
        ("--ops", tuple(OPS), "one-read and two-pass: forward+backward of a mean, of sums"),
    ):
        parser.add_argument(
            option,
            type=_list_of(_one_of(names)),
            default=names,
            metavar="A,B,...",
            help=f"{text} (default {','.join(names)})",
        )
    parser.add_argument(
        "--rounds", type=_rounds, metavar="N", help=f"rounds of timings (default {ROUNDS})"
    )
    parser.add_argument(
        "--reuse-inputs",
        action="store_true",
        help="time on one set of inputs, kept in cache, instead of rotating several",
    )
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="leave torch.compile out (compiling takes most of the time of small shapes)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="toy shapes and few rounds: shows that it works"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write JSON")


def _list_of(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    return parse


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"a shape must be sequences x tokens, such as 512x8192, got {text!r}"
        )
    return int(match[1]), int(match[2])


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            expected = ", ".join(map(repr, names))
            raise argparse.ArgumentTypeError(f"expected some of {expected}, got {text!r}")
        return text

    return parse


def _rounds(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """0: measured. 130: interrupted, what was done is shown. 1: a wrong result. 2: a mistake."""
    if arguments.out is not None and (reason := _cannot_write(arguments.out)) is not None:
        return _fail(f"cannot write to {arguments.out}: {reason}", 2)
    quick = arguments.quick
    plan = Plan(
        rounds=arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        reused=arguments.reuse_inputs,
        with_compile=arguments.compile,
    )
    shapes = arguments.shapes or (QUICK_SHAPES if quick else SHAPES)
    chosen = itertools.product(shapes, arguments.ops, arguments.dtypes)
    cases = [Case(OPS[op], dtype, shape) for shape, op, dtype in chosen]
    where = conditions(plan)
    results = Results()
    try:
        with progress(len(cases), plan.rounds) as begin:
            for case in cases:
                _measure_into(results, case, plan, begin)
        results.finished = True
    except WrongResult as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        results.notes.append("Interrupted: the cases that follow were not measured.")
    print_results(results, where)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(to_json(results, where), indent=2) + "\n")
        print(f"JSON: {arguments.out}")
    return 0 if results.finished else 130


def _measure_into(results: Results, case: Case, plan: Plan, begin: Begin) -> None:
    after_round = begin(case.name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            rows, probe = measure(case, plan, after_round)
        except Skip as reason:
            results.skipped[case.name] = str(reason)
            return
    results.rows += rows
    results.notes += [f"{case.name}: {warning.message}" for warning in caught]
    if probe is not None:
        results.probes[case.name] = probe


def _cannot_write(path: Path) -> str | None:
    """Why a file cannot be written, before there is anything to write; None if it can."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    return None


def _fail(message: str, code: int) -> int:
    print(f"klfast bench: error: {message}", file=sys.stderr)
    return code
