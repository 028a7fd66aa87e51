"""Everything that needs a GPU, in one command: build, tests, sanitizers, benchmark.

``make gpu-check PYTHON=python3`` uses that Python's torch and no network, takes less than nine
minutes, and writes ``gpu.json`` and ``gpu-logits.json`` (the benchmarks), ``gpu-check.json`` and
``gpu-check.log`` to ``$OUT``, or to ``benchmarks/results``. ``PHASES`` lists the commands. A step
that fails hides no other, but the exit code.
"""

import argparse
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks import tables

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "gpu-check"
SITE = WORK / "site"
BUDGET = 210  # seconds for the cases of one in `make gpu-check`, at the most

OPTIONS = {
    "gpu": ["--device", "cuda"],
    "gpu-logits": [
        *("--device", "cuda", "--suite", "logits", "--dtypes", "bf16"),
        *("--shapes", "8192x151936,2048x32000"),
    ],
}
"""Name of the results -> options; ``python -m benchmarks --device cuda --suite logits`` measures
the rest."""

ALONE = {
    "gpu-topk": ["--device", "cuda", "--suite", "topk"],
    "gpu-linear": ["--device", "cuda", "--suite", "linear", "--dtypes", "bf16"],
    "gpu-step": ["--device", "cuda", "--suite", "step", "--dtypes", "bf16"],
}
"""The same of those that `make gpu-check` has no time for."""

RESULTS = tuple(f"{name}.json" for name in OPTIONS)  # the files that the benchmarks write
SHOWN_LINES = 12  # the lines that are shown of the log of a step that failed
BENCH_OVERHEAD = 40
"""Seconds that a benchmark takes besides its cases, the last of which may begin late."""
LAST_WORDS = 15  # seconds for a step that is ended to say what it has found

INSTALLED = {
    # The sources, for lab and benchmarks, after the build. Without PYTHONSAFEPATH python -m would
    # put them first, and take klfast from there, without its extension.
    "PYTHONPATH": os.pathsep.join(filter(None, (f"{SITE}", f"{ROOT}", os.getenv("PYTHONPATH")))),
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "KLFAST_REQUIRE_CUDA": "1",
}
ALLOCATOR = WORK / "sanitizer_allocator.so"
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider"]
ON_CUDA = "cuda and not reference and not (triton and (test_numbers or test_limits))"
"""The tests of our kernels, on the GPU. What runs on any machine is left to others. So are the
files that ask Triton for more variants than there is time to compile."""
CUDA_TESTS = [
    "tests/gpu/test_cuda_first_use.py",  # every family's known answers, before all else
    "tests/gpu/test_cuda.py",
    "tests/gpu/test_cuda_logits.py",
    "tests/gpu/test_cuda_controllers.py",
]
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
SKIPPED_GPU = (
    r"(?im)^SKIPPED \[\d+\] \S+: .*(\b(no|needs an?|without an?) (CUDA|GPU)|(for|on) cuda\b)"
)
"""The skip reason of a test that misses the GPU. Other backends have another."""


class Step(NamedTuple):
    """A command and what makes it a success, beyond its exit code.

    Attributes:
        name: in tables and logs.
        command: ``{budget}`` in it is what the benchmark has left.
        environment: variables in addition to this process's.
        must_print: a pattern that its output must hold. The last match is shown.
        must_not_print: a pattern that its output must not hold.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str] = MappingProxyType({})
    must_print: str = ""
    must_not_print: str = ""


def sanitizer(tool: str) -> Step:
    """The tests marked for it under one tool of compute-sanitizer, which must say 0."""
    command = f"compute-sanitizer --tool {tool} --error-exitcode 9 --report-api-errors no"
    tests = [*PYTEST, "-p", "no:xdist", "-m", "sanitizer", *CUDA_TESTS]
    return Step(
        tool,
        [*command.split(), "--target-processes", "application-only", *tests],
        {**INSTALLED, "KLFAST_TEST_ALLOCATOR": str(ALLOCATOR)},
        must_print=r"(?:ERROR|RACECHECK) SUMMARY: 0 .*",
    )


def suite(name: str, *arguments: str) -> Step:
    """Tests that must pass, none of which may miss the GPU."""
    command = [*PYTEST, "-o", "faulthandler_timeout=120", "--durations=10", *arguments]
    environment = {**INSTALLED, "OMP_NUM_THREADS": "2"}  # beside other workers
    return Step(name, command, environment, r"\d+ passed.* in [\d.]+s", SKIPPED_GPU)


def benchmark(name: str, results: str) -> Step:
    """``python -m benchmarks`` on the GPU, within what time it has."""
    command = [sys.executable, "-m", "benchmarks", *OPTIONS[results]]
    command += ["--budget", "{budget}", "--out", str(WORK / f"{results}.json"), "--force"]
    return Step(name, command, INSTALLED, must_print=r"JSON: .*")


BUILD = "build"
PIP = f"pip install --no-build-isolation --no-deps --no-index --target {SITE} ."
PHASES: dict[float, list[Step]] = {
    125: [
        Step(BUILD, [sys.executable, "-m", *PIP.split()], {"FORCE_CUDA": "1"}),
        Step(
            "allocator",
            [
                *f"nvcc -shared -Xcompiler -fPIC -o {ALLOCATOR}".split(),
                "tests/gpu/sanitizer_allocator.cu",
            ],
        ),
    ],
    265: [
        suite("cuda", "-n", "4", "-v", *CUDA_TESTS),
        suite("tests", "-n", "8", "-v", "-k", ON_CUDA, *NOT_HERE, "tests"),
        *map(sanitizer, ("memcheck", "racecheck", "initcheck", "synccheck")),
    ],
    390: [benchmark("benchmark", "gpu")],
    537: [benchmark("logits", "gpu-logits")],
}
"""Seconds after the beginning when a phase must have ended -> its steps, which run at once."""


def log_of(name: str) -> Path:
    return WORK / f"{name}.log"


def text_of(name: str) -> str:
    """The log of a step, which is empty before the step begins."""
    return log_of(name).read_text(errors="replace") if log_of(name).exists() else ""


def call(step: Step, seconds: float) -> tuple[str, str]:
    """(status, detail) of a step that has so many seconds. Its output is in its log."""
    if seconds <= 1:
        return "not run", "no time was left"
    budget = int(max(1, min(BUDGET, seconds - BENCH_OVERHEAD)))
    # timeout ends the step's children too: first as Ctrl-C does, so that pytest says what failed.
    limit = max(seconds - LAST_WORDS, seconds / 2)
    command = ["timeout", "--signal=INT", f"--kill-after={LAST_WORDS}", f"{limit:.1f}"]
    command += [str(budget) if part == "{budget}" else part for part in step.command]
    with log_of(step.name).open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **step.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        RUNNING.add(process)
        begun, code = time.monotonic(), process.wait()
        RUNNING.discard(process)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of its group
    if code == 124 or time.monotonic() - begun >= limit:
        return "timeout", f"interrupted after {limit:.0f} s of its {seconds:.0f} s"
    return judge(step, code, text_of(step.name))


def judge(step: Step, code: int, output: str) -> tuple[str, str]:
    """(status, detail) of a step that has ended."""
    found = re.findall(step.must_print, output) if step.must_print else []
    detail = found[-1].strip(" =").replace(f"{ROOT}/", "") if found else ""
    if code != 0:
        return "failed", detail or f"exit code {code}"
    if step.must_print and not found:
        return "failed", f"did not print {step.must_print!r}"
    forbidden = re.search(step.must_not_print, output) if step.must_not_print else None
    if forbidden is not None:
        return "failed", output[forbidden.start() :].splitlines()[0]
    return "ok", detail


def run(out: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs every phase, and writes the outcomes after each, which it returns."""
    begun = time.monotonic()
    outcomes: list[dict[str, Any]] = []

    def one(step: Step, until: float) -> dict[str, Any]:
        start = time.monotonic()
        built = all(each["status"] == "ok" for each in outcomes if each["name"] == BUILD)
        status, detail = "not run", "was stopped" if STOPPED.is_set() else f"{BUILD} failed"
        if built and not STOPPED.is_set():
            status, detail = call(step, until - (start - begun))
        seconds = round(time.monotonic() - start, 1)
        print(f"{status:8} {step.name:12} {seconds:6.1f} s", flush=True)
        return {"name": step.name, "status": status, "seconds": seconds, "detail": detail}

    for until, steps in PHASES.items():
        with ThreadPoolExecutor(len(steps)) as pool:
            outcomes += pool.map(one, steps, [until] * len(steps))
        record = {"passed": passed(outcomes), **facts, "steps": outcomes}
        (out / "gpu-check.json").write_text(json.dumps(record, indent=2) + "\n")
        logs = (f"\n===== {each['name']}\n{text_of(each['name'])}" for each in outcomes)
        (out / "gpu-check.log").write_text("".join(logs))
    return outcomes


def passed(outcomes: list[dict[str, Any]]) -> bool:
    return all(outcome["status"] == "ok" for outcome in outcomes)


RUNNING: set[subprocess.Popen[bytes]] = set()
STOPPED = threading.Event()


def stop(*_: object) -> None:
    """Ends what runs, and begins nothing more."""
    STOPPED.set()
    for process in [*RUNNING]:
        process.send_signal(signal.SIGINT)


def environment() -> dict[str, Any]:
    """The device and the versions.

    Raises:
        SystemExit: a need of all steps is missing.
    """
    import torch

    if not torch.cuda.is_available() or not shutil.which("nvcc"):
        here = torch.cuda.is_available()
        raise SystemExit(f"missing: {'nvcc' if here else 'a CUDA device that torch sees'}")
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
    smi = last_line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0")
    git = ("git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--exclude=*")
    return {
        "commit": os.environ.setdefault("KLFAST_COMMIT", last_line(*git)),  # for the build too
        "device": torch.cuda.get_device_name(0),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "clocks": dict(zip(query.split(","), smi.split(", "), strict=False)),
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvcc": last_line("nvcc", "--version"),
            "compute-sanitizer": last_line("compute-sanitizer", "--version"),
        },
    }


def last_line(*command: str) -> str:
    """The output of a command. It is a sentence if the command cannot be run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every step has passed."""
    parser = argparse.ArgumentParser(description="Build, test, sanitize and measure on a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="list the steps and run none")
    if parser.parse_args(argv).dry_run:
        for until, steps in PHASES.items():
            print(f"until {until:.0f} s{', at once' * (len(steps) > 1)}:")
            for step in steps:
                added = " ".join(f"{name}={value}" for name, value in step.environment.items())
                print(f"  {step.name}: {added} {shlex.join(step.command)}")
        return 0
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results").resolve()
    facts = environment()
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in (WORK, out):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_CUDA_ARCH_LIST"] = facts["capability"]  # a third of the time of all
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    outcomes = run(out, facts)
    for name in filter(lambda name: (WORK / name).exists(), RESULTS):
        shutil.copy(WORK / name, out)
        print("\n" + tables.block(json.loads((out / name).read_text())))
    for each in outcomes:
        if each["status"] in ("failed", "timeout"):
            last = text_of(each["name"]).splitlines()[-SHOWN_LINES:]
            print("\n".join([f"\n--- {each['name']}", *last]))
    verdict = "passed" if passed(outcomes) else "FAILED"
    print(f"\n{tables.steps_table(outcomes)}\n\n{verdict}; {out}")
    return 0 if passed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
