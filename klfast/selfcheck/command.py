"""The ``check`` subcommand."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from klfast import backends
from klfast.checks.arguments import check_choice
from klfast.info import info, text
from klfast.selfcheck import calls
from klfast.selfcheck.cases import FAMILIES
from klfast.selfcheck.compare import Truth, Wrong, transferred, truth_of, wrong_of
from klfast.selfcheck.promises import promises
from klfast.selfcheck.timing import TIMES, TimeRow, cells_of, time_on

HELP = "known answers of every function, on every backend of every device that is here"

COMPILED_AT_FIRST_USE, BUDGET = ("triton",), 30.0
"""Backends that take about a second for each new kind of call, once a machine. Unless named they
get the basic cases, which hold every option once, and of these what fits into so many seconds."""

SHOWN = 20
"""Failures that the text has; ``--json`` has all."""


class UsageError(Exception):
    """A mistake on the command line; its text is the whole message."""


@dataclass(frozen=True)
class Target:
    """A backend on a device. ``thorough``: it gets all cases."""

    device: str
    backend: str
    thorough: bool


@dataclass
class Tally:
    """The outcome of one function on one target."""

    device: str
    backend: str
    family: str
    cases: int = 0
    failed: int = 0
    left_out: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Failure:
    """A case that failed, and the first of its outputs that is wrong."""

    device: str
    backend: str
    family: str
    case: str
    output: str
    got: str
    expected: str
    error: str
    tolerance: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``klfast check``."""
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: all that are here)")
    parser.add_argument("--backend", help="native, triton or reference (default: all that can run)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--time", action="store_true", help="also time six sizes, beside eager PyTorch and a copy"
    )


@contextlib.contextmanager
def _refusing_nothing() -> Iterator[None]:
    """Let kernels that fail the known answers before their first use be called: their numbers are
    the report.
    """
    before = os.environ.get("KLFAST_SELF_CHECK")
    os.environ["KLFAST_SELF_CHECK"] = "0"
    try:
        yield
    finally:
        del os.environ["KLFAST_SELF_CHECK"]
        if before is not None:
            os.environ["KLFAST_SELF_CHECK"] = before


def run(arguments: argparse.Namespace) -> int:
    """0 if all is right, 1 if something is not, 2 for a device or backend that is not here."""
    begin = time.perf_counter()
    facts = info()
    try:
        devices = _devices(arguments.device, list(facts["backends"]))
        targets, missing = _targets(arguments.backend, devices)
    except (UsageError, ValueError) as error:
        print(f"klfast check: error: {error}", file=sys.stderr)
        return 2
    if not arguments.json:
        print(text(facts), flush=True)
    with warnings.catch_warnings(), _refusing_nothing():
        warnings.simplefilter("ignore")  # hints at likely mistakes, some of which are cases here
        tallies, failures = check(targets)
        times = _times(targets) if arguments.time else []
    report = {
        "passed": not failures,
        "seconds": time.perf_counter() - begin,
        "checks": [asdict(tally) for tally in tallies],
        "not_available": missing,
        "failures": [asdict(failure) for failure in failures],
        "times": [asdict(row) for row in times],
        "info": facts,
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return int(bool(failures))


def _devices(wanted: str | None, here: Sequence[str]) -> Sequence[str]:
    """The devices to check, of those that are here."""
    if wanted is None:
        return here
    name = f"cuda:{torch.cuda.current_device()}" if wanted == "cuda" and len(here) > 1 else wanted
    if name not in here:
        raise UsageError(f"device must be one of {', '.join(here)}, got {wanted!r}")
    return [name]


def _targets(
    wanted: str | None, devices: Sequence[str]
) -> tuple[list[Target], list[dict[str, str]]]:
    """Who is checked, and why others are not."""
    if wanted is not None:
        check_choice("backend", wanted, tuple(backends.BACKENDS))
    targets, missing = [], []
    for device in devices:
        for name, reason in backends.why_not(torch.device(device)).items():
            if wanted not in (None, name):
                continue
            if reason is None:
                thorough = wanted is not None or name not in COMPILED_AT_FIRST_USE
                targets.append(Target(device, name, thorough))
            else:
                missing.append({"device": device, "backend": name, "reason": reason})
    if not targets:
        reasons = "; ".join(f"{m['device']}: {m['reason']}" for m in missing)
        raise UsageError(f"backend {wanted!r} cannot run here: {reasons}")
    return targets, missing


def check(targets: Sequence[Target]) -> tuple[list[Tally], list[Failure]]:
    """Checks every case on every target, in one thread: what is checked is small."""
    tallies = {
        (t, f): Tally(t.device, t.backend, f) for t in targets for f in FAMILIES if _has(t, f)
    }
    spent = dict.fromkeys(targets, 0.0)
    failures = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for target, family, case, outcome in _outcomes(targets):
            tally, begin = tallies[target, family], time.perf_counter()
            if spent[target] > BUDGET and not target.thorough:
                tally.left_out += 1
                continue
            wrong = _wrong(outcome)
            seconds = time.perf_counter() - begin
            spent[target] += seconds
            tally.seconds += seconds
            tally.cases += 1
            tally.failed += bool(wrong)
            failures += [
                Failure(target.device, target.backend, family, case, *each) for each in wrong[:1]
            ]
    finally:
        torch.set_num_threads(threads)
    return list(tallies.values()), failures


def _has(target: Target, family: str) -> bool:
    """Whether a backend has kernels for the function of a family."""
    return not backends.BACKENDS[target.backend].lacks(FAMILIES[family].function)


_Outcome = Callable[[], list[Wrong]]


def _outcomes(targets: Sequence[Target]) -> Iterator[tuple[Target, str, str, _Outcome]]:
    """(target, family, case, what says what is wrong); the truth of a case serves all targets."""
    cases = (case for name, family in FAMILIES.items() for case in family.cases(name))
    for case in sorted(cases, key=lambda case: case.seed):  # the basic ones of every function first
        asked = [
            target
            for target in targets
            if (case.is_basic or target.thorough) and _has(target, case.family)
        ]
        if asked:
            call = case.call()
            truth = truth_of(call)
        for target in asked:
            yield target, case.family, case.name, partial(_of_call, call, truth, target)
    for target in targets:
        for promise in promises(target.backend, torch.device(target.device)):
            if _has(target, promise[0]):
                yield target, *promise


def _of_call(call: calls.Call, truth: Truth, target: Target) -> list[Wrong]:
    tensors = calls.placed(call, torch.device(target.device))
    return wrong_of(call, truth, transferred(calls.run(call, tensors, target.backend)))


def _wrong(outcome: _Outcome) -> list[Wrong]:
    try:
        return outcome()
    except Exception as error:  # which is an outcome too
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Wrong("the call", said, "no error", "-", "-")]


def _times(targets: Sequence[Target]) -> list[TimeRow]:
    """The outcomes of every device that is checked."""
    rows = []
    for device in dict.fromkeys(target.device for target in targets):
        rows += time_on(device, [target.backend for target in targets if target.device == device])
    return rows


def _print(report: dict[str, Any]) -> None:
    """The tables: what was checked, what is not available, what failed, and the times."""
    _print_table(
        ("device", "backend", "checked", "cases", "failed", "left out", "seconds"),
        [(*list(c.values())[:-1], f"{c['seconds']:.2f}") for c in report["checks"]],
    )
    for each in report["not_available"]:
        print(f"{each['device']}: {each['backend']} is not available: {each['reason']}")
    if any(c["left_out"] for c in report["checks"]):
        print(f"left out after {BUDGET:.0f} s of compiling: run it again, or name the backend")
    failures = report["failures"]
    if failures:
        cells = [(" ".join(list(f.values())[:4]), *list(f.values())[4:]) for f in failures[:SHOWN]]
        _print_table(("case", "output", "got", "expected", "error", "tolerance"), cells)
    if len(failures) > SHOWN:
        print(f"and {len(failures) - SHOWN} more, which --json has")
    if report["times"]:
        _print_table(TIMES, [cells_of(row) for row in report["times"]])
    cases = sum(c["cases"] for c in report["checks"])
    verdict = f"{len(failures)} FAILED" if failures else "all right"
    print(f"\n{cases} cases in {report['seconds']:.1f} s: {verdict}")


def _print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    print()
    print_plainly([tuple(headings), *(tuple(map(str, row)) for row in rows)])


def print_plainly(lines: Sequence[tuple[str, ...]]) -> None:
    """Lines of cells in columns, the first two from the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        left, right = line[:2], line[2:]
        padded = [f"{cell:<{width}}" for cell, width in zip(left, widths[:2], strict=True)]
        padded += [f"{cell:>{width}}" for cell, width in zip(right, widths[2:], strict=True)]
        print("  ".join(padded).rstrip())
