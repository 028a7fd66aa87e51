"""Everything that needs a GPU, in one command: build, tests, sanitizers, benchmark.

``make gpu-check PYTHON=python3`` uses that Python's torch and no network, takes less than nine
minutes, and writes ``gpu.json`` and ``gpu-logits.json`` (the benchmarks), ``gpu-check.json`` and
``gpu-check.log`` to ``$OUT``, or to ``benchmarks/results``. A step that fails hides no other, but
the exit code. The first phases end in time for the last, the benchmarks, to have their share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import gpu_plan, tables

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "gpu-check"
SITE = WORK / "site"

LOG_BYTES = 1 << 20
"""The lines of each step's log that are kept, from its end."""
SHOWN_LINES = 12
"""The lines that are shown of the log of a step that failed."""

RESULTS = tuple(f"{name}.json" for name in gpu_plan.OPTIONS)
"""The files that the benchmarks write."""

LARGEST_SHARE = 0.6
"""The share of a lane's time that a step may take while others wait for theirs."""

BENCH_OVERHEAD = 40
"""Seconds that a benchmark takes besides its cases, the last of which may begin late."""

LAST_WORDS = 15
"""Seconds for a step that is ended to say what it has found."""

Environment = Mapping[str, str]

INSTALLED = {
    # The sources, for lab and benchmarks, after the build: without PYTHONSAFEPATH python -m would
    # put them first, and take klfast from there, without its extension.
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")])
    ),
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "KLFAST_REQUIRE_CUDA": "1",
}
ALLOCATOR = WORK / "sanitizer_allocator.so"
SANITIZED = {**INSTALLED, "KLFAST_TEST_ALLOCATOR": str(ALLOCATOR)}
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider"]
MANY_VARIANTS = (
    "test_numbers",
    "test_limits",
)
ON_CUDA = f"cuda and not reference and not (triton and ({' or '.join(MANY_VARIANTS)}))"
"""The tests of our kernels, on the GPU. What runs on any machine is left to others; so are the
files that ask Triton for many variants, more than there is time to compile: its interpreter runs
them elsewhere."""
CUDA_TESTS = [
    "tests/gpu/test_cuda_first_use.py",  # every family's known answers, before all else
    "tests/gpu/test_cuda.py",
    "tests/gpu/test_cuda_logits.py",
    "tests/gpu/test_cuda_controllers.py",
]
"""Tests of known answers, streams, graphs, syncs, memory, large sizes and controllers. Some of them
are for the sanitizers."""
NOT_HERE = [
    f"--ignore={path}"
    for path in (
        *CUDA_TESTS,
        "tests/release",  # of wheels, with packages that other tests do not need
        "tests/gpu/test_cuda_build.py",
        "tests/gpu/test_triton_compiles.py",
        "tests/gpu/test_triton_interpreted.py",
    )
]
PASSED = r"\d+ passed.* in [\d.]+s"
SKIPPED_GPU = (
    r"(?im)^SKIPPED \[\d+\] \S+: .*(\b(no|needs an?|without an?) (CUDA|GPU)|(for|on) cuda\b)"
)
"""The skip reason of a test that needs a GPU: there is no GPU, or nothing to run on it. Backends
that do not serve the CPU have another skip reason there."""


@dataclass(frozen=True)
class Step:
    """A command and what makes it a success, beyond its exit code.

    Attributes:
        name: in tables and logs.
        command: ``{budget}`` in it is what the benchmark has left.
        environment: variables in addition to this process's.
        must_print: a pattern that its output must hold. The last match is shown.
        must_not_print: a pattern that its output must not hold.
        needed: whether all later steps depend on it.
    """

    name: str
    command: list[str]
    environment: Environment = field(default_factory=dict)
    must_print: str = ""
    must_not_print: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Phase:
    """Lanes that run at once, each a sequence of steps.

    Attributes:
        until: seconds after the beginning of all when the phase must have ended.
    """

    until: float
    lanes: list[list[Step]]

    @property
    def steps(self) -> Iterator[Step]:
        return (step for lane in self.lanes for step in lane)


@dataclass
class Outcome:
    """The outcome of a step: ``status`` is ok, failed, timeout or not run."""

    name: str
    status: str
    seconds: float = 0.0
    detail: str = ""


def sanitizer(tool: str) -> Step:
    """The tests marked for it under one tool of compute-sanitizer, which must say 0."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += ["--target-processes", "application-only", "--report-api-errors", "no"]
    tests = [*PYTEST, "-p", "no:xdist", "-m", "sanitizer", *CUDA_TESTS]
    return Step(tool, [*command, *tests], SANITIZED, must_print=r"(ERROR|RACECHECK) SUMMARY: 0 .*")


def suite(name: str, *arguments: str) -> Step:
    """Tests that must pass, none of which may miss the GPU."""
    command = [*PYTEST, "-o", "faulthandler_timeout=120", "--durations=10", *arguments]
    environment = {**INSTALLED, "OMP_NUM_THREADS": "2"}  # beside other workers
    return Step(name, command, environment, must_print=PASSED, must_not_print=SKIPPED_GPU)


def benchmark(name: str, work: Path, results: str) -> Step:
    """``python -m benchmarks`` on the GPU, within what time it has."""
    command = [sys.executable, "-m", "benchmarks", *gpu_plan.OPTIONS[results]]
    command += ["--budget", "{budget}", "--out", str(work / f"{results}.json"), "--force"]
    return Step(name, command, INSTALLED, must_print=r"JSON: .*")


def phases(work: Path) -> list[Phase]:
    """All that is run."""
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    pip += ["--no-index", "--disable-pip-version-check", "--target", str(SITE), "."]
    this = [sys.executable, "-m", "benchmarks.gpu_check"]
    allocator = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-o", str(ALLOCATOR)]
    allocator += ["tests/gpu/sanitizer_allocator.cu"]
    return [
        Phase(40, [[Step("environment", [*this, "--environment"], needed=True)]]),
        Phase(
            125,
            [
                [Step("build", pip, {"FORCE_CUDA": "1"}, needed=True)],
                [Step("allocator", allocator, needed=True)],
            ],
        ),
        Phase(
            265,
            [
                [suite("cuda", "-n", "4", "-v", *CUDA_TESTS)],
                [suite("tests", "-n", "8", "-v", "-k", ON_CUDA, *NOT_HERE, "tests")],
                *([sanitizer(t)] for t in ("memcheck", "racecheck", "initcheck", "synccheck")),
            ],
        ),
        Phase(390, [[benchmark("benchmark", work, "gpu")]]),
        Phase(537, [[benchmark("logits", work, "gpu-logits")]]),
    ]


class Check:
    """Runs phases; keeps what became of each step, on disk after every one."""

    def __init__(self, plan: Sequence[Phase], out: Path, work: Path) -> None:
        self.plan, self.out, self.work, self.logs = plan, out, work, work / "logs"
        self.begun = time.monotonic()
        self.outcomes: list[Outcome] = []
        self.broken = ""
        self.running: set[subprocess.Popen[bytes]] = set()
        self.lock = threading.Lock()
        shutil.rmtree(work, ignore_errors=True)
        self.logs.mkdir(parents=True)
        out.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    @property
    def passed(self) -> bool:
        return all(outcome.status == "ok" for outcome in self.outcomes)

    def run(self) -> None:
        """Every phase, each lane of it in a thread."""
        for phase in self.plan:
            with ThreadPoolExecutor(len(phase.lanes)) as pool:
                list(pool.map(self._run_lane, phase.lanes, [phase.until] * len(phase.lanes)))
        for name in RESULTS:
            if (results := self.work / name).exists():
                shutil.copy(results, self.out)

    def stop(self) -> None:
        """Ends what runs, and begins nothing more."""
        self.broken = "was stopped"
        for process in list(self.running):
            kill(process)

    def _run_lane(self, lane: Sequence[Step], until: float) -> None:
        for step in lane:
            left = until - self.elapsed
            outcome = self._run_step(step, left if step is lane[-1] else left * LARGEST_SHARE)
            if step.needed and outcome.status != "ok" and not self.broken:
                self.broken = f"{step.name} failed"
            with self.lock:
                self.outcomes.append(outcome)
                print(f"{outcome.status:8} {outcome.name:12} {outcome.seconds:6.1f} s", flush=True)
                self.write()

    def _run_step(self, step: Step, left: float) -> Outcome:
        if self.broken:
            return Outcome(step.name, "not run", detail=self.broken)
        if left <= 1:
            return Outcome(step.name, "not run", detail="no time was left")
        budget = int(max(1, min(gpu_plan.BUDGET, left - BENCH_OVERHEAD)))
        command = [
            part.format(budget=budget) if part == "{budget}" else part for part in step.command
        ]
        begun = time.monotonic()
        status, detail = self._call(step, command, left)
        return Outcome(step.name, status, round(time.monotonic() - begun, 1), detail)

    def _call(self, step: Step, command: list[str], seconds: float) -> tuple[str, str]:
        log = self.logs / f"{step.name}.log"
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **self._architecture(), **step.environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # so that its children end with it
                )
            except OSError as error:
                output.write(str(error).encode())
                return "failed", f"{command[0]}: {error.strerror}"
            self.running.add(process)
            try:
                code = process.wait(max(seconds - LAST_WORDS, seconds / 2))
            except subprocess.TimeoutExpired:
                kill(process)
                return "timeout", f"had {seconds:.0f} s"
            finally:
                self.running.discard(process)
        return judge(step, code, log.read_text(errors="replace"))

    def write(self) -> None:
        """The JSON and the log, of what has been done so far."""
        steps = [asdict(outcome) for outcome in self.outcomes]
        data = {
            "passed": self.passed,
            "seconds": round(self.elapsed, 1),
            "commit": os.environ.get("KLFAST_COMMIT") or None,
            "sources": digest(),
            **self._environment(),
            "steps": steps,
        }
        (self.out / "gpu-check.json").write_text(json.dumps(data, indent=2) + "\n")
        with (self.out / "gpu-check.log").open("wb") as all_logs:
            for outcome in self.outcomes:
                all_logs.write(f"\n===== {outcome.name}: {outcome.status}\n".encode())
                all_logs.write(self.log(outcome.name)[-LOG_BYTES:])

    def log(self, name: str) -> bytes:
        path = self.logs / f"{name}.log"
        return path.read_bytes() if path.exists() else b""

    def _architecture(self) -> Environment:
        """The architecture to compile for: this device's alone, a third of the time of all."""
        capability = self._environment().get("capability")
        return {"TORCH_CUDA_ARCH_LIST": capability} if capability else {}

    def _environment(self) -> dict[str, Any]:
        """The output of the step of that name."""
        lines = self.log("environment").splitlines()
        with suppress(ValueError, IndexError):
            facts: dict[str, Any] = json.loads(lines[-1])
            return facts
        return {}


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a step's whole process group, and waits for the step: first as Ctrl-C does, so that
    pytest says what has failed so far.
    """
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(LAST_WORDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(step: Step, code: int, output: str) -> tuple[str, str]:
    """(status, detail) of a step that has ended."""
    found = re.findall(f"({step.must_print})", output) if step.must_print else []
    last = found[-1] if found else ""
    detail = (last if isinstance(last, str) else last[0]).strip(" =").replace(f"{ROOT}/", "")
    if code != 0:
        return "failed", detail or f"exit code {code}"
    if step.must_print and not found:
        return "failed", f"did not print {step.must_print!r}"
    forbidden = re.search(step.must_not_print, output) if step.must_not_print else None
    if forbidden is not None:
        return "failed", output[forbidden.start() :].splitlines()[0]
    return "ok", detail


def digest() -> str:
    """A hash of the sources: says which commit ran where the sources came without their history."""
    found = hashlib.sha256()
    for folder, pattern in (("csrc", "*"), ("klfast", "*.py")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            if path.is_file():
                found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def environment() -> int:
    """Prints the environment as JSON. Returns 1 if a need of all steps is missing, and names it."""
    import torch

    if not torch.cuda.is_available() or not shutil.which("nvcc"):
        print(
            f"missing: {'nvcc' if torch.cuda.is_available() else 'a CUDA device that torch sees'}"
        )
        return 1
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
    smi = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    facts = {
        "device": torch.cuda.get_device_name(0),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "clocks": dict(zip(query.split(","), last_line(smi).split(", "), strict=False)),
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvcc": last_line(["nvcc", "--version"]),
            "compute-sanitizer": last_line(["compute-sanitizer", "--version"]),
        },
    }
    print(json.dumps(facts))
    return 0


def last_line(command: list[str]) -> str:
    """The output of a command; a sentence if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def commit() -> str:
    """The commit of the sources; empty outside a checkout."""
    git = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError):
        done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""


def show_plan(plan: Sequence[Phase]) -> None:
    """The steps that would be run, printed."""
    for phase in plan:
        at_once = " (lanes run at once)" if len(phase.lanes) > 1 else ""
        print(f"until {phase.until:.0f} s{at_once}:")
        for lane, steps in enumerate(phase.lanes):
            for step in steps:
                added = [f"{name}={value}" for name, value in step.environment.items()]
                number = f"lane {lane + 1}, " if at_once else ""
                print(f"  {number}{step.name}: {' '.join(added)} {shlex.join(step.command)}")


def show_results(check: Check) -> None:
    """The ends of the logs of what failed, the benchmarks' tables, and what became of each step."""
    for outcome in check.outcomes:
        if outcome.status in ("failed", "timeout"):
            print(f"\n--- {outcome.name}")
            log = check.log(outcome.name).decode(errors="replace").splitlines()
            print("\n".join(log[-SHOWN_LINES:]))
    for path in (check.work / name for name in RESULTS):
        data = json.loads(path.read_text()) if path.exists() else {"rows": []}
        if data["rows"]:
            print("\n" + tables.gpu_block(data))
    print("\n" + tables.steps_table(map(asdict, check.outcomes)))
    print(f"\n{'passed' if check.passed else 'FAILED'} in {check.elapsed:.0f} s; {check.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every step has passed."""
    parser = argparse.ArgumentParser(description="Build, test, sanitize and measure on a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="list the steps and run none")
    parser.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.environment:
        return environment()
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results").resolve()
    plan = phases(WORK)
    if arguments.dry_run:
        show_plan(plan)
        return 0
    os.environ.setdefault("KLFAST_COMMIT", commit())
    check = Check(plan, out, WORK)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: check.stop())
    check.run()
    show_results(check)
    return 0 if check.passed else 1


if __name__ == "__main__":
    sys.exit(main())
