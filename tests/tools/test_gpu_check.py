"""The steps of ``make gpu-check``: they name existing files, and no failure is hidden."""

import argparse
from pathlib import Path

import pytest

from benchmarks import command, gpu_check
from benchmarks.gpu_check import judge

ROOT = Path(__file__).parents[2]


def test_every_step_names_what_is_there():
    """A machine without a GPU would not notice a missing test or option."""
    steps = [step for phase in gpu_check.PHASES.values() for step in phase]
    for step in steps:
        paths = [part.removeprefix("--ignore=") for part in step.command if part.endswith(".py")]
        assert all((ROOT / path).is_file() for path in paths), step.name
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    suites = {}
    for step in steps[-2:]:
        options = step.command[step.command.index("benchmarks") + 1 :]
        given = [part.format(budget=60) for part in options]
        arguments = parser.parse_args(given)
        suites[arguments.out.name] = (arguments.device, arguments.suite, arguments.budget)
    assert suites == {"gpu.json": ("cuda", "tokens", 60), "gpu-logits.json": ("cuda", "logits", 60)}
    assert list(suites) == list(gpu_check.RESULTS)


SANITIZER = gpu_check.sanitizer("memcheck")
TESTS = gpu_check.suite("tests")


@pytest.mark.parametrize(
    ("step", "code", "output", "status"),
    [
        (SANITIZER, 0, "========= ERROR SUMMARY: 0 errors\n", "ok"),
        (SANITIZER, 0, "========= RACECHECK SUMMARY: 1 hazard displayed", "failed"),
        (SANITIZER, 0, "24 passed in 3.00s: but no sanitizer has run", "failed"),
        (TESTS, 0, "== 24 passed, 1 skipped in 75.30s (0:01:15) ==", "ok"),
        (TESTS, 0, "SKIPPED [2] tests/test_a.py:9: no CUDA device\n1 passed in 1.00s", "failed"),
        (TESTS, 0, "SKIPPED [9] tests/conftest.py:9: runs on GPUs\n1 passed in 1.00s", "ok"),
        (TESTS, 1, "1 failed, 23 passed in 3.00s", "failed"),
        (TESTS, 0, "no tests ran in 0.01s", "failed"),
    ],
)
def test_a_success_is_what_has_run_and_found_nothing(step, code, output, status):
    assert judge(step, code, output)[0] == status
