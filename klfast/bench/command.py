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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from klfast.bench import gpu, gpu_report
from klfast.bench.cases import DTYPES, OPS, Case
from klfast.bench.check import WrongResult
from klfast.bench.measure import ROUNDS, Plan, Skip, measure, one_line
from klfast.bench.progress import Begin, Tick, progress
from klfast.bench.report import Results, conditions, print_results, summary, to_json

HELP = "time klfast against eager PyTorch and torch.compile on this machine"

DEVICES = ("cpu", "cuda")

SHAPES = ((512, 8192), (4096, 16384), (4, 64))
QUICK_SHAPES = ((16, 256),)
QUICK_ROUNDS = 3

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="where (default cpu); defaults differ"
    )
    parser.add_argument(
        "--shapes",
        type=_list_of(_shape),
        metavar="BxT,...",
        help=f"sequences x tokens (default {_text(SHAPES)}; on cuda {_text(gpu.SHAPES)})",
    )
    parser.add_argument(
        "--packed",
        type=_list_of(_shape),
        metavar="BxT,...",
        help=f"packed, sequences x mean tokens (cuda only; default {_text(gpu.PACKED_SHAPES)}, "
        "none with --shapes)",
    )
    parser.add_argument(
        "--dtypes",
        type=_list_of(_one_of(tuple(DTYPES))),
        default=tuple(DTYPES),
        metavar="A,B,...",
        help=f"of the log-probs (default {','.join(DTYPES)})",
    )
    parser.add_argument(
        "--ops",
        type=_list_of(_one_of(tuple(OPS))),
        metavar="A,B,...",
        help="one-read and two-pass: forward+backward of a mean, of sums "
        f"(default {','.join(OPS)}; on cuda {','.join(gpu.OPS)})",
    )
    parser.add_argument(
        "--rounds",
        type=_whole_number,
        metavar="N",
        help=f"rounds of timings (default {ROUNDS}; on cuda {gpu.ROUNDS})",
    )
    parser.add_argument(
        "--budget",
        type=_whole_number,
        metavar="SECONDS",
        help=f"what comes later is left out (cuda only; default {gpu.BUDGET:.0f})",
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


def _text(shapes: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{rows}x{columns}" for rows, columns in shapes)


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


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Bench:
    """What differs between devices.

    Attributes:
        cases, rounds: what is measured, and how often.
        measure: (case, called after each round) -> its rows, and the probe behind its ``read``.
        where: the conditions so far.
        show: prints results and conditions.
        keep_going: whether the cases behind one that fails are measured.
        notes: what a reader must know before there is a result.
        failed: what goes wrong within a case that is measured; filled as it does.
    """

    cases: list[Case]
    rounds: int
    measure: Callable[[Case, Tick], tuple[Sequence[Any], str | None]]
    where: Callable[[], dict[str, Any]]
    show: Callable[[Results, dict[str, Any]], None]
    keep_going: bool = False
    notes: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


def run(arguments: argparse.Namespace) -> int:
    """0: measured. 130: interrupted, what was done is shown. 1: a wrong result. 2: a mistake."""
    if (mistake := _mistake(arguments)) is not None:
        return _fail(mistake, 2)
    try:
        bench = (_gpu_bench if arguments.device == "cuda" else _cpu_bench)(arguments)
    except gpu.NoBackend as error:
        return _fail(str(error), 1)
    results = Results(notes=list(bench.notes), failed=bench.failed)
    try:
        with progress(len(bench.cases), bench.rounds) as begin:
            for case in bench.cases:
                _measure_into(results, case, bench, begin)
                _write(results, bench, arguments.out)
        results.finished = True
    except WrongResult as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        results.notes.append("Interrupted: the cases that follow were not measured.")
    bench.show(results, bench.where())
    if arguments.out is not None:
        _write(results, bench, arguments.out)
        print(f"JSON: {arguments.out}")
    if results.failed:
        return 1
    return 0 if results.finished else 130


def _mistake(arguments: argparse.Namespace) -> str | None:
    """What cannot be done, before anything is; None if all can."""
    if arguments.out is not None and (reason := _cannot_write(arguments.out)) is not None:
        return f"cannot write to {arguments.out}: {reason}"
    if arguments.device == "cpu":
        given = [name for name in ("packed", "budget") if getattr(arguments, name) is not None]
        return f"--{given[0]} needs --device cuda" if given else None
    if arguments.reuse_inputs:
        return "--reuse-inputs needs --device cpu: on a GPU the cache is always flushed"
    return None if gpu.find_place() else "--device cuda: torch sees no CUDA device here"


def _cpu_bench(arguments: argparse.Namespace) -> Bench:
    plan = Plan(
        rounds=arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS),
        reused=arguments.reuse_inputs,
        with_compile=arguments.compile,
    )
    shapes = arguments.shapes or (QUICK_SHAPES if arguments.quick else SHAPES)
    where = conditions(plan)
    return Bench(
        cases=_cases(shapes, arguments.ops or tuple(OPS), arguments.dtypes),
        rounds=plan.rounds,
        measure=lambda case, after_round: measure(case, plan, after_round),
        where=lambda: where,
        show=lambda results, where: print_results(results, summary(where)),
    )


def _gpu_bench(arguments: argparse.Namespace) -> Bench:
    plan = gpu.GpuPlan(
        rounds=arguments.rounds or (QUICK_ROUNDS if arguments.quick else gpu.ROUNDS),
        with_compile=arguments.compile,
        budget=arguments.budget or gpu.BUDGET,
    )
    chosen = arguments.shapes or (QUICK_SHAPES if arguments.quick else None)
    ops = arguments.ops or gpu.OPS
    unpacked = _cases(chosen or gpu.SHAPES, ops, arguments.dtypes)
    of_packed = arguments.packed or (chosen if arguments.quick else None)
    packed = _cases(
        of_packed or (() if chosen else gpu.PACKED_SHAPES),
        [op for op in ops if not OPS[op].stats],  # eager's statistics are of rows
        arguments.dtypes,
        packed=True,
    )
    cases = unpacked + packed
    place = gpu.find_place()
    assert place is not None  # _mistake has looked
    bench = gpu.GpuBench(place, plan, len(cases))
    return Bench(
        cases=cases,
        rounds=plan.rounds,
        measure=bench.measure,
        where=lambda: gpu_report.gpu_conditions(place, plan, bench.ceilings),
        show=gpu_report.print_gpu_results,
        failed=bench.failed,
        keep_going=True,  # time on a GPU is too dear to end at a rival's mistake
        notes=(f"not timed: {bench.missing}",) if bench.missing else (),
    )


def _cases(
    shapes: Sequence[tuple[int, int]],
    ops: Sequence[str],
    dtypes: Sequence[str],
    packed: bool = False,
) -> list[Case]:
    chosen = itertools.product(shapes, ops, dtypes)
    return [Case(OPS[op], dtype, shape, packed) for shape, op, dtype in chosen]


def _measure_into(results: Results, case: Case, bench: Bench, begin: Begin) -> None:
    after_round = begin(case.name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            rows, probe = bench.measure(case, after_round)
        except Skip as reason:
            results.skipped[case.name] = str(reason)
            return
        except Exception as error:
            if not bench.keep_going:
                raise
            results.failed[case.name] = one_line(error)
            return
    results.rows += rows
    results.notes += [f"{case.name}: {warning.message}" for warning in caught]
    if probe is not None:
        results.probes[case.name] = probe


def _write(results: Results, bench: Bench, path: Path | None) -> None:
    """After every case, as a benchmark that is stopped from outside has no end to write at."""
    if path is not None:
        path.write_text(json.dumps(to_json(results, bench.where()), indent=2) + "\n")


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
