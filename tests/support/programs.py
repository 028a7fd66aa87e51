"""The programs in examples/, each in a process of its own."""

import os
import re
import subprocess
import sys

import readme

FOLDER = readme.ROOT / "examples"
_STEP = re.compile(r"step (\d+): (?:reward ([\d.]+), )?KL ([\d.]+), coefficient ([\d.]+)")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?%?(?!\w)")


def output_of(name, *arguments, launcher=()):
    """Run an example by the name of its file, and return its output. A warning is an error."""
    process = subprocess.run(
        [sys.executable, "-W", "error", *launcher, FOLDER / name, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(readme.ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def steps_of(output):
    """(step, reward, KL, coefficient) of each line, as the training loops print them."""
    rows = [_STEP.fullmatch(line).groups() for line in output.splitlines()]
    return [tuple(None if cell is None else float(cell) for cell in row) for row in rows]


def table_of(output):
    """The text before the colon of a line -> the numbers after it. Per cents become shares."""
    rows = (line.split(": ", 1) for line in output.splitlines() if ": " in line)
    return {name: [_number(word) for word in _NUMBER.findall(rest)] for name, rest in rows}


def _number(word):
    return float(word[:-1]) / 100 if word.endswith("%") else float(word)
