"""The ``check`` subcommand."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from klfast import backends
from klfast.args.checks import check_choice
from klfast.backends.info import cpu_error, info, why_not
from klfast.cli.check.calls import Call
from klfast.cli.check.cases import FAMILIES
from klfast.cli.check.compare import Truth, Wrong, found_by, truth_of, wrong_of
from klfast.cli.check.promises import promises
from klfast.cli.info import text

HELP = "compare every function with known answers, on every backend and device of this machine"

# Backends that take about a second for each new kind of call, once a machine. Unless named they get
# the basic cases, which hold every option once, and of these what fits into so many seconds.
COMPILED_AT_FIRST_USE, BUDGET = ("triton",), 30.0

SHOWN = 20  # failures that the text has; ``--json`` has all

Targets = Mapping[tuple[str, str], bool]  # (Device, backend) -> whether it gets all cases


@dataclass
class Tally:
    """The outcome of one function on a backend of a device."""

    device: str
    backend: str
    family: str
    cases: int = 0
    failed: int = 0
    left_out: int = 0
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="check cpu, cuda or cuda:1 alone (default: all devices)")
    parser.add_argument(
        "--backend", help="check native, triton or reference alone (default: all that can run)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--strict", action="store_true", help='also fail for a backend that "auto" does not choose'
    )


def run(arguments: argparse.Namespace) -> int:
    """0 if what counts passed, 1 if not, 2 for a device or backend that is not here."""
    begin = time.perf_counter()
    facts = info()
    try:
        devices = _devices(arguments.device, list(facts["backends"]))
        targets, missing = _targets(arguments.backend, devices)
    except ValueError as error:
        print(f"klfast check: error: {error}", file=sys.stderr)
        return 2
    if not arguments.json:
        # Before the cases, because a kernel that ends the process would take it with it.
        print(text(facts), flush=True)
    # Kernels that fail the known answers before their first use are called too: their numbers are
    # the report.
    with warnings.catch_warnings(), mock.patch.dict(os.environ, KLFAST_SELF_CHECK="0"):
        warnings.simplefilter("ignore")  # hints at likely mistakes, some of which are cases here
        tallies, failures = check(targets)
    verdicts = _verdicts(tallies, arguments)
    # ``auto`` does not avoid an instruction set that KLFAST_CPU names and this CPU lacks.
    refused = [each["reason"] for each in missing if each["reason"] == cpu_error()]
    passed = not refused and not any(each["counts"] and each["failed"] for each in verdicts)
    report = {
        "passed": passed,
        "verdict": verdicts,
        "next": "; ".join(refused) or _next_step(verdicts, passed),
        "seconds": time.perf_counter() - begin,
        "checks": [asdict(tally) for tally in tallies],
        "not_available": missing,
        "failures": failures,
        "info": facts,
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return int(not passed)


def _devices(wanted: str | None, here: Sequence[str]) -> Sequence[str]:
    if wanted is None:
        return here
    # "cuda" is the current one where there are several.
    name = f"cuda:{torch.cuda.current_device()}" if wanted == "cuda" and len(here) > 1 else wanted
    if name not in here:
        raise ValueError(f"--device must be one of {', '.join(here)}, got {wanted!r}")
    return [name]


def _targets(wanted: str | None, devices: Sequence[str]) -> tuple[Targets, list[dict[str, str]]]:
    if wanted is not None:
        check_choice("backend", wanted, tuple(backends.BACKENDS))
    targets, missing = {}, []
    for device in devices:
        for name, reason in why_not(torch.device(device)).items():
            if wanted not in (None, name):
                continue
            if reason is None:
                targets[device, name] = wanted is not None or name not in COMPILED_AT_FIRST_USE
            else:
                missing.append({"device": device, "backend": name, "reason": reason})
    if not targets:
        reasons = "; ".join(f"{m['device']}: {m['reason']}" for m in missing)
        raise ValueError(f"--backend {wanted} cannot run here: {reasons}")
    return targets, missing


def check(targets: Targets) -> tuple[list[Tally], list[dict[str, str]]]:
    """The tallies, and of each case that failed the first of its outputs that is wrong."""
    tallies = {(t, f): Tally(*t, f) for t in targets for f in FAMILIES if _has(t, f)}
    spent = dict.fromkeys(targets, 0.0)
    failures = []
    # The cases are small, and threads would only wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for target, family, case, outcome in _outcomes(targets):
            tally, begin = tallies[target, family], time.perf_counter()
            # Compiling takes seconds. Only a backend that was named is checked in full.
            if spent[target] > BUDGET and not targets[target]:
                tally.left_out += 1
                continue
            try:
                wrong = outcome()
            except Exception as error:  # which is an outcome too
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                wrong = [Wrong("the call", said, "no error", "-", "-")]
            seconds = time.perf_counter() - begin
            spent[target] += seconds
            tally.seconds += seconds
            tally.cases += 1
            tally.failed += bool(wrong)
            names = {"device": target[0], "backend": target[1], "family": family, "case": case}
            failures += [{**names, **each._asdict()} for each in wrong[:1]]
    finally:
        torch.set_num_threads(threads)
    return list(tallies.values()), failures


def _has(target: tuple[str, str], family: str) -> bool:
    """True if a backend has kernels for the function of a family."""
    device, backend = target
    return not backends.BACKENDS[backend].lacks(FAMILIES[family].function, torch.device(device))


_Outcome = Callable[[], list[Wrong]]


def _outcomes(targets: Targets) -> Iterator[tuple[tuple[str, str], str, str, _Outcome]]:
    """(target, family, case, outcome) of each check. All targets share a case's truth."""
    cases = (case for name, family in FAMILIES.items() for case in family.cases(name))
    for case in sorted(cases, key=lambda case: case.seed):  # the basic ones of every function first
        asked = [
            target
            for target, thorough in targets.items()
            if (case.is_basic or thorough) and _has(target, case.family)
        ]
        if asked:
            call = case.call()
            truth = truth_of(call)
        for target in asked:
            yield target, case.family, case.name, partial(_of_call, call, truth, *target)
    for device, backend in targets:
        for promise in promises(backend, torch.device(device)):
            if _has((device, backend), promise[0]):
                yield (device, backend), *promise


def _of_call(call: Call, truth: Truth, device: str, backend: str) -> list[Wrong]:
    return wrong_of(truth, found_by(call, backend, torch.device(device)))


def _verdicts(tallies: Sequence[Tally], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The backends that "auto" chooses on each device, checked or not, and the others."""
    found = []
    for device in dict.fromkeys(tally.device for tally in tallies):
        reasons = backends.why_not(torch.device(device))
        chosen = {
            name: backends.first_available(reasons, torch.device(device), family.function)
            for name, family in FAMILIES.items()
        }
        # A backend that is chosen and was not checked has a row too.
        groups: dict[tuple[bool, str], list[Tally]] = {(True, b): [] for b in chosen.values()}
        for tally in tallies:
            if tally.device == device:
                auto = chosen[tally.family] == tally.backend
                groups.setdefault((auto, tally.backend), []).append(tally)
        for (auto, backend), own in groups.items():
            families = [t.family for t in own] or [f for f in chosen if chosen[f] == backend]
            found.append(
                {
                    "device": device,
                    "backend": backend,
                    "auto": auto,
                    # A failure fails the check where it counts.
                    "counts": auto or arguments.strict or arguments.backend is not None,
                    "functions": [FAMILIES[name].function for name in families],
                    "cases": sum(tally.cases for tally in own),
                    "failed": sum(tally.failed for tally in own),
                }
            )
    return found


def _sentence(verdict: dict[str, Any]) -> str:
    device, backend, cases = (verdict[name] for name in ("device", "backend", "cases"))
    outcome = f"passed {cases} cases" if cases else "was not checked"
    if verdict["failed"]:
        outcome = f"FAILED {verdict['failed']} of {cases} cases"
    if verdict["auto"]:
        functions = verdict["functions"]
        of = f" for {', '.join(functions)}" if len(functions) < len(FAMILIES) else ""
        return f'{device}: "auto" uses {backend}{of}, which {outcome}'
    matters = f", which matters only with backend={backend!r}" if verdict["failed"] else ""
    return f"{device}: {backend} {outcome}{matters}"


def _next_step(verdicts: Sequence[dict[str, Any]], passed: bool) -> str:
    steps = [_avoiding(v, verdicts) for v in verdicts if v["counts"] and v["failed"]]
    if passed and all(verdict["cases"] for verdict in verdicts):
        steps.append("use klfast")
    elif passed:
        steps.append('run `klfast check` without --backend, which checks what "auto" uses')
    if any(verdict["auto"] and verdict["backend"] == "reference" for verdict in verdicts):
        steps.append("reference is slow; see above why no other backend is available")
    if any(verdict["failed"] for verdict in verdicts):
        steps.append("open an issue with this output")
    return "; ".join(steps)


def _avoiding(wrong: dict[str, Any], verdicts: Sequence[dict[str, Any]]) -> str:
    device, backend = wrong["device"], wrong["backend"]
    for other in verdicts:
        serves = other["cases"] and {*other["functions"]} >= {*wrong["functions"]}
        if other["device"] == device and serves and not other["failed"]:
            return f"use backend={other['backend']!r} on {device} until {backend} is right"
    return f"do not use {backend} on {device}"


def _print(report: dict[str, Any]) -> None:
    _print_table(
        ("device", "backend", "checked", "cases", "failed", "left out", "seconds"),
        [(*list(c.values())[:-1], f"{c['seconds']:.2f}") for c in report["checks"]],
        texts=3,
    )
    for each in report["not_available"]:
        print(f"{each['device']}: {each['backend']} is not available: {each['reason']}")
    if any(c["left_out"] for c in report["checks"]):
        print(f"left out: compiling took {BUDGET:.0f} s; run it again, or name the backend")
    failures = report["failures"]
    if failures:
        cells = [(" ".join(list(f.values())[:4]), *list(f.values())[4:]) for f in failures[:SHOWN]]
        _print_table(("case", "output", "got", "expected", "error", "tolerance"), cells)
    if len(failures) > SHOWN:
        print(f"and {len(failures) - SHOWN} more, which --json prints")
    cases = sum(c["cases"] for c in report["checks"])
    print(f"\n{cases} cases in {report['seconds']:.1f} s, {len(failures)} failed")
    for verdict in report["verdict"]:
        print(_sentence(verdict))
    print(f"{'passed' if report['passed'] else 'FAILED'}: {report['next']}")


def _print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], texts: int = 2) -> None:
    """Cells in columns: the first columns are texts, from the left, the others numbers."""
    lines = [tuple(headings), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for line in lines:
        sides = "<" * texts + ">" * (len(line) - texts)
        cells = (f"{c:{side}{w}}" for c, side, w in zip(line, sides, widths, strict=True))
        print("  ".join(cells).rstrip())
