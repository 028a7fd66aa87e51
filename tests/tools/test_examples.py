"""The programs in examples/ run as they are, in seconds, and do what they say."""

import os
import re
import subprocess
import sys

import pytest
import readme

EXAMPLES = readme.ROOT / "examples"
LINE = re.compile(r"step (\d+): (?:reward ([\d.]+), )?KL ([\d.]+), coefficient ([\d.]+)")


def printed(*command):
    """(step, reward, KL, coefficient) of each line that a program prints."""
    process = subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(readme.ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    rows = [LINE.fullmatch(line).groups() for line in process.stdout.splitlines()]
    return [tuple(None if cell is None else float(cell) for cell in row) for row in rows]


def assert_steers(rows):
    """The coefficient moves from its first value, and the KL ends near its target of 3 nats."""
    assert [row[0] for row in rows] == [20, 40, 60, 80, 100]
    assert rows[-1][3] not in (0.05, 0.3)
    assert 1 < rows[-1][2] < 6


def test_grpo_learns_near_its_reference():
    rows = printed(EXAMPLES / "grpo.py")
    assert_steers(rows)
    assert rows[-1][1] > 0.12  # the reference says "7" once in 16 words


def test_ppo_holds_its_target():
    rows = printed(EXAMPLES / "ppo.py")
    assert_steers(rows)
    assert rows[-1][1] > 1.5  # of 12 words; the reference says "7" less than once


@pytest.mark.long
def test_grpo_on_two_ranks():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert_steers(printed(*torchrun, EXAMPLES / "grpo_two_ranks.py"))
