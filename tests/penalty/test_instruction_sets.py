"""Every instruction set that this processor has: one wheel serves all, so each copy counts.

The copy that this process uses is tested by all other files; here are the others, in processes of
their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from klfast import backends

TESTS = (
    "test_accuracy.py",
    "test_determinism.py",
    "../rollout/test_rollout_bits.py",
    "../rollout/test_rollout_oracle.py",
)
NAMES = (
    "native and not emulated and not cuda and "
    "(sweep or every_pass or realistic or alone or padding or memory or neighbours or rule or "
    "weight)"
)
RUN = """
import sys, pytest
from klfast import _C
print("uses", _C.instruction_set(), flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


exhaustive = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _needs_native():
    reason = backends.BACKENDS["native"].why_not(torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)


def run(instruction_set, *arguments):
    return subprocess.run(
        [sys.executable, "-c", *arguments],
        env=os.environ | {"KLFAST_CPU": instruction_set},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
@pytest.mark.parametrize("part", ["not exhaustive", pytest.param("exhaustive", marks=exhaustive)])
@pytest.mark.parametrize(
    "instruction_set",
    ["baseline", *(pytest.param(s, marks=exhaustive) for s in ("avx2", "avx512"))],
)
def test_every_instruction_set_keeps_the_promises(instruction_set, part):
    from klfast import _C

    if instruction_set == _C.instruction_set():
        pytest.skip(f"{instruction_set}: what this process uses, and every other file tests")
    options = ["-q", "-x", "-m", part, "-k", NAMES, "-p", "no:cacheprovider", *TESTS]
    done = run(instruction_set, RUN, *options)
    lacks = re.search(r"which this (processor|build) does not have", done.stderr)
    if lacks:
        pytest.skip(f"this {lacks[1]} does not have {instruction_set}")
    assert f"uses {instruction_set}\n" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
