"""``python -m benchmarks``: its options, the loop over the cases, and how it ends."""

import argparse
import functools
import itertools
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import idle, measure, memory, outcome
from benchmarks.candidates import WrongResult
from benchmarks.cases import DTYPES, Case, Op, Shape, Suite, shape_text
from benchmarks.suites import SUITES

HELP = "time klfast against eager PyTorch and torch.compile on this machine"

CPU_OPTIONS = {
    "reuse_inputs": "on a GPU the cache is always flushed",
    "keep_memory": "on a GPU torch always keeps what is freed",
    "allow_load": "a GPU's time is not that of other processes on the CPU",
}
"""Flags, and why a GPU has no use for them."""

QUICK_ROUNDS = 3

REMEDY = "measure again when they have ended, or pass --allow-load, which the file will say"

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options. ``SUITES`` has the defaults of shapes, ops and rounds."""
    sizes = "; ".join(f"{suite.name}: {suite.rows_by_columns}" for suite in SUITES.values())
    shapes, several, add = _list_of(_shape), "A,B,...", parser.add_argument
    add(
        "--suite",
        choices=tuple(SUITES),
        default="tokens",
        help="what to time. tokens: the k3 penalty of log-probs (default). options: its clips, "
        "importance weights and gradients, beside plain k3. logits: divergences and log-probs over "
        "the whole vocabulary. topk: distillation from a teacher's top-K. linear: log-probs and "
        "divergences from hidden states. step: whole training steps of a small transformer",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="the device (default cpu)")
    text = f"shapes to time in place of the suite's. {sizes}"
    add("--shapes", type=shapes, metavar="RxC,...", help=text)
    text = "packed shapes, sequences x mean tokens (only for --suite tokens --device cuda)"
    add("--packed", type=shapes, metavar="BxT,...", help=text)
    text = "cases to time (default: all of the suite): " + "; ".join(
        f"{suite.name}: {', '.join(suite.ops)}" for suite in SUITES.values()
    )
    add("--ops", type=_list_of(str), metavar=several, help=text)
    text = f"dtypes of the inputs (default {','.join(DTYPES)})"
    add("--dtypes", type=_list_of(str), default=(*DTYPES,), metavar=several, help=text)
    times = f"default {measure.ROUNDS} on cpu; on cuda the suite says it"
    text = f"how often each case is timed ({times})"
    add("--rounds", type=_whole_number, metavar="N", help=text)
    text = "leave out the cases that are not reached within so many seconds (cuda only)"
    add("--budget", type=_whole_number, metavar="SECONDS", help=text)
    for flag, text in (
        ("--reuse-inputs", "time on one set of inputs, which stays in the cache (cpu)"),
        (
            "--keep-memory",
            "keep freed memory in the process, as in a long training run. Without it, malloc gives "
            "large blocks back, and each new block costs page faults (cpu, glibc)",
        ),
        ("--quick", "toy shapes and few rounds, to see that it runs; prints no ratios"),
        ("--force", "replace the file of an earlier run"),
        ("--allow-load", "write the file under load too; the file then says so (cpu)"),
    ):
        add(flag, action="store_true", help=text)
    text = "leave torch.compile out, whose compilation takes long"
    add("--no-compile", dest="compile", action="store_false", help=text)
    text = (
        "also write JSON to this file. Nothing is written if other processes took more than "
        f"{100 * idle.LIMIT:.0f}%% of the cores' time (cpu), or if the file exists already"
    )
    add("--out", type=Path, metavar="FILE.json", help=text)


def _list_of(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    return lambda text: tuple(kind(part.strip()) for part in text.split(","))


def _shape(text: str) -> Shape:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", text):
        raise argparse.ArgumentTypeError(
            f"a shape must be rows x columns, such as 512x8192, got {text!r}"
        )
    return tuple(map(int, text.split("x")))


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Bench:
    """The functions that differ between devices.

    Attributes:
        cases: the cases to measure.
        measure: measures a case.
        where: the conditions.
        keep_going: whether the cases after a failing one are measured.
        notes: facts that a reader must know before there is a result.
        failed: failures within a measured case; filled when they happen.
    """

    cases: list[Case]
    measure: Callable[[Case], measure.Measured]
    where: Callable[[], dict[str, Any]]
    keep_going: bool = False
    notes: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


def run(arguments: argparse.Namespace) -> int:
    """Runs a suite and returns the exit status.

    0 means measured. 130 means interrupted, with the finished cases shown. 1 is a wrong result, and
    2 a mistake. 3 is a load on the machine, and then nothing is written.
    """
    if (mistake := _mistake(arguments)) is not None:
        return _fail(mistake, 2)
    # A GPU's times are its own clock's.
    refuses_load = arguments.out and not arguments.allow_load and arguments.device == "cpu"
    if refuses_load and (reason := _load_now()) is not None:
        return _fail(f"{arguments.out} cannot be written: {reason}; {REMEDY}", 3)
    suite = SUITES[arguments.suite]
    try:
        if arguments.device == "cuda":
            bench = _gpu_bench(arguments, suite)
        else:
            bench = _cpu_bench(arguments, suite, measure.ATTEMPTS if refuses_load else 1)
    except (measure.NoBackend, memory.NotKept) as error:
        return _fail(str(error), 1 if isinstance(error, measure.NoBackend) else 2)
    results = outcome.Results(notes=list(bench.notes), failed=bench.failed)
    out: Path | None = arguments.out
    earlier = out.read_bytes() if out is not None and out.exists() else None

    def where() -> dict[str, Any]:
        on_cpu, allowed = arguments.device == "cpu", arguments.allow_load
        load = outcome.load_conditions(results, allowed) if on_cpu else {}
        facts = {"suite": suite.name, **suite.facts, "quick": arguments.quick}
        return {**bench.where(), **facts, **load}

    try:
        for number, case in enumerate(bench.cases, start=1):
            print(f"[{number}/{len(bench.cases)}] {case.name}", file=sys.stderr, flush=True)
            _measure_into(results, case, bench)
            if out is not None:
                outcome.write_json(out, where(), **outcome.to_json(results))
        results.finished = True
    except WrongResult as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        results.notes.append("Interrupted: the cases that follow were not measured.")
    outcome.print_results(results, where(), suite, arguments.device)
    if out is not None:
        if refuses_load and (reason := outcome.loaded_text(results.loads)) is not None:
            if earlier is None:
                out.unlink(missing_ok=True)
            else:
                out.write_bytes(earlier)
            return _fail(f"{out} was not written: {reason}; {REMEDY}", 3)
        outcome.write_json(out, where(), **outcome.to_json(results))
        print(f"JSON: {out}")
    if results.failed:
        return 1
    return 0 if results.finished else 130


def _load_now() -> str | None:
    """The fault of the load before anything is measured; None if there is none."""
    begin = idle.reading()
    time.sleep(1.0)
    load = idle.since(begin)
    if load is None:
        return "this system does not say how much time other processes take"
    return None if load.is_idle else f"other processes take {load.share:.0%} of the cores' time"


def _mistake(arguments: argparse.Namespace) -> str | None:
    """The part of a request that cannot be done; None if all can."""
    suite, out = SUITES[arguments.suite], arguments.out
    for option, given, known in (
        ("--dtypes", arguments.dtypes, DTYPES),
        (f"--ops of --suite {suite.name}", arguments.ops or (), suite.ops),
    ):
        for name in given:
            if name not in known:
                return f"{option}: expected some of {', '.join(map(repr, known))}, got {name!r}"
    for shape in (*(arguments.shapes or ()), *(arguments.packed or ())):
        if len(shape) != len(suite.sizes):
            return (
                f"--shapes of --suite {suite.name}: a shape must be {suite.rows_by_columns}, such "
                f"as {shape_text(suite.shapes[0])}, got {shape_text(shape)!r}"
            )
    if out is not None and (reason := outcome.cannot_write(out)) is not None:
        return f"cannot write to {out}: {reason}"
    if out is not None and out.exists() and not arguments.force:
        return f"{out} is there already: replace it (--force), or name another file"
    if arguments.device == "cpu":
        given = [name for name in ("packed", "budget") if getattr(arguments, name) is not None]
        return f"--{given[0]} needs --device cuda" if given else None
    if arguments.packed is not None and suite.name != "tokens":
        return "--packed needs --suite tokens"
    for name, reason in CPU_OPTIONS.items():
        if getattr(arguments, name):
            return f"--{name.replace('_', '-')} needs --device cpu: {reason}"
    return None if measure.find_place() else "--device cuda: torch sees no CUDA device here"


def _cpu_bench(arguments: argparse.Namespace, suite: Suite, attempts: int) -> Bench:
    if arguments.keep_memory:
        memory.keep_memory()
    plan = measure.Plan(
        rounds=arguments.rounds or (QUICK_ROUNDS if arguments.quick else measure.ROUNDS),
        reused=arguments.reuse_inputs,
        with_compile=arguments.compile,
        with_memory=suite.with_memory,
        keeps_memory=arguments.keep_memory,
        attempts=attempts,
    )
    shapes = arguments.shapes or (suite.quick_shapes if arguments.quick else suite.shapes)
    ops = [suite.ops[name] for name in arguments.ops or suite.ops]
    return Bench(
        cases=_cases(shapes, ops, arguments.dtypes),
        measure=lambda case: measure.measure(case, plan),
        where=functools.cache(lambda: outcome.conditions(plan)),
    )


def _gpu_bench(arguments: argparse.Namespace, suite: Suite) -> Bench:
    plan = measure.Plan(
        rounds=arguments.rounds or (QUICK_ROUNDS if arguments.quick else suite.gpu_rounds),
        budget=arguments.budget or suite.gpu_budget,
        with_compile=arguments.compile,
    )
    cases = gpu_cases(arguments, suite)
    place = measure.find_place()
    assert place is not None  # _mistake has looked
    bench = measure.GpuBench(place, plan, cases)
    return Bench(
        cases=cases,
        measure=bench.measure,
        where=lambda: outcome.gpu_conditions(place, plan, bench.ceilings),
        failed=bench.failed,
        keep_going=True,  # GPU time is expensive: a rival's mistake must not end it
        notes=tuple(f"not timed: {reason}" for reason in bench.missing),
    )


def gpu_cases(arguments: argparse.Namespace, suite: Suite) -> list[Case]:
    """Unpacked, then packed; with shapes that are given, no others."""
    ops = [suite.ops[name] for name in arguments.ops or suite.gpu_ops or suite.ops]
    given = arguments.shapes or (suite.quick_shapes if arguments.quick else None)
    default = given if arguments.quick else () if given else suite.gpu_packed_shapes
    packable = [op for op in ops if op.can_pack]
    return [
        *_cases(given or suite.gpu_shapes, ops, arguments.dtypes),
        *_cases(arguments.packed or default or (), packable, arguments.dtypes, packed=True),
    ]


def _cases(
    shapes: Sequence[Shape], ops: Sequence[Op], dtypes: Sequence[str], packed: bool = False
) -> list[Case]:
    chosen = itertools.product(shapes, ops, dtypes)
    return [Case(op, dtype, shape, packed) for shape, op, dtype in chosen]


def _measure_into(results: outcome.Results, case: Case, bench: Bench) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            measured = bench.measure(case)
        except measure.Skip as reason:
            results.skipped[case.name] = str(reason)
            return
        except Exception as error:
            if not bench.keep_going:
                raise
            results.failed[case.name] = measure.one_line(error)
            return
    results.rows += measured.rows
    results.loads[case.name] = measured.load
    results.notes += [f"{case.name}: {warning.message}" for warning in caught]
    if measured.probe is not None:
        results.probes[case.name] = measured.probe


def _fail(message: str, code: int) -> int:
    print(f"python -m benchmarks: error: {message}", file=sys.stderr)
    return code
