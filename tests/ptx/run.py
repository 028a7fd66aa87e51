"""``make test-ptx`` runs the emulator's tests on nvcc's PTX, with several chips and schedules.

Each part is a run of pytest in its own environment. A whole run writes the coverage of sm_90
(coverage.py). CI runs ``--short``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

import coverage  # noqa: E402
import ptx_build  # noqa: E402

COVERAGE = ptx_build.FOLDER / "coverage"
EMULATED = ("-k", "native-emulated", "-m", "not exhaustive")


class Part(NamedTuple):
    """Arguments of pytest, and KLFAST_PTX_ variables without their prefix."""

    paths: tuple[str, ...]
    options: tuple[str, ...] = EMULATED
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed
    is_short: bool = False

    @property
    def arch(self):
        return self.environment.get("ARCH", "90")


FOLDERS = ("tests/conformance/test_numbers.py", "tests/penalty", "tests/logits", "tests/gpu")
# Every kind of kernel, in minutes.
KINDS = (
    "tests/penalty/test_masking.py",
    "tests/penalty/test_reductions.py",
    "tests/penalty/test_stats.py",
    "tests/logits/test_logits_masking.py",
    "tests/logits/test_logits_stats.py",
    "tests/logits/test_logits_temperatures.py",
)
LOGITS = KINDS[3:]
PRODUCTS = (
    "tests/ptx/kernels/test_ptx_products.py",
    "tests/ptx/kernels/test_ptx_logits_products.py",
)
NEAR = (
    "tests/logits/test_logits_accuracy.py",
    "tests/logits/test_logits_temperatures.py",
    "tests/penalty/test_accuracy.py",
)

# Triton compiles its kernels itself, up to the PTX.
TRITON = ("-p", "ptx_triton", "-k", "triton", "-m", "not exhaustive")
OF_TRITON = tuple(f"tests/gpu/triton_interpreted_{kind}suite.py" for kind in ("", "logits_"))
NUMBERS = ("accuracy", "extreme")

PARTS = {
    "short": Part(KINDS, is_short=True),
    "short, Triton": Part(OF_TRITON[:1], (*TRITON, "-k", "triton and combine"), is_short=True),
    "sm_90, H200": Part(FOLDERS),
    "every dtype, mask and rule": Part(PRODUCTS, ()),
    "random options": Part(("tests/ptx/kernels/test_ptx_sweep.py",), ()),
    "random schedule, races in global memory": Part(
        KINDS, environment={"SCHEDULE": "random", "RACES": "all", "SEED": "2"}
    ),
    "the ring, random schedule, all races": Part(
        ("tests/gpu/test_ring.py",), (), {"SCHEDULE": "random", "RACES": "all", "SEED": "4"}
    ),
    "approximations off by an ulp": Part(NEAR, environment={"PERTURB": "1", "SEED": "3"}),
    "sm_90, a MIG slice": Part(LOGITS, environment={"CHIP": "mig"}),
    "sm_90, RTX 5090": Part(LOGITS, environment={"CHIP": "rtx5090"}),
    "sm_80, A100": Part(KINDS, environment={"ARCH": "80", "CHIP": "a100"}),
    "sm_80, L4": Part(LOGITS, environment={"ARCH": "80", "CHIP": "l4"}),
    "sm_100, B200": Part((*KINDS, *NEAR), environment={"ARCH": "100", "CHIP": "b200"}),
    "sm_90, Triton": Part(
        (*OF_TRITON, *map("tests/logits/test_logits_{}.py".format, NUMBERS)), TRITON
    ),
    "instructions of small calls": Part(("tests/ptx/kernels/test_ptx_paths.py",), ()),
    "faults": Part(("tests/ptx/kernels/test_ptx_faults.py",), ()),
}


def chosen(arguments):
    if arguments.parts:
        return {name: PARTS[name] for name in arguments.parts}
    return {name: part for name, part in PARTS.items() if part.is_short == arguments.short}


def environment_of(part):
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    made = {"KLFAST_PTX_ARCH": "90", **os.environ, "PYTHONPATH": path}
    made |= {f"KLFAST_PTX_{name}": value for name, value in part.environment.items()}
    if part.arch == coverage.ARCH:
        made["KLFAST_PTX_COVERAGE"] = str(COVERAGE / "part")
    return made


def counts_of(report):
    """The counts in a report in JUnit's format. A skipped test is no case."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    cases = count["tests"] - count["skipped"]
    return {"cases": cases, "passed": cases - count["failures"] - count["errors"]}


def run(name, part):
    """Run a part, whose pytest may fail, and return its counts."""
    print(f"== {name}", flush=True)
    started = time.monotonic()
    ptx_build.build(part.arch)
    compiled = time.monotonic()
    report = ptx_build.FOLDER / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q"]
    command += ["-p", "no:benchmark", f"--junit-xml={report}", *part.paths, *part.options]
    code = subprocess.run(command, cwd=ROOT, env=environment_of(part), check=False).returncode
    counts = counts_of(report)
    counts["seconds"] = round(time.monotonic() - compiled)
    print(
        f"== {name}: {counts['passed']} of {counts['cases']} passed in {counts['seconds']} s, "
        f"after {compiled - started:.0f} s of compiling",
        flush=True,
    )
    return code, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="what CI runs: five minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--list", action="store_true", help="the parts, without running any")
    arguments = parser.parse_args()
    parts = chosen(arguments)
    if arguments.list:
        print("\n".join(parts))
        return 0
    if not ptx_build.has_nvcc():
        print(ptx_build.NO_NVCC, file=sys.stderr)
        return 1
    is_whole = not (arguments.parts or arguments.short)
    if is_whole:
        shutil.rmtree(COVERAGE, ignore_errors=True)
    COVERAGE.mkdir(parents=True, exist_ok=True)
    done = {name: run(name, part) for name, part in parts.items()}
    if is_whole:
        data = coverage.write(COVERAGE, {name: counts for name, (_, counts) in done.items()})
        print(f"{100 * data['share']:.1f} % of the instructions of {data['arch']} have run")
    failed = [name for name, (code, _) in done.items() if code != 0]
    if failed:
        print("failed: " + "; ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
