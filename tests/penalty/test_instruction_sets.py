"""Every instruction set of this processor keeps the promises. One wheel serves all processors.

All other files test the copy that this process uses. The other copies run here, each in a process
of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from klfast import backends

FOLDER = Path(__file__).parents[1]
TESTS = (
    "penalty/test_accuracy.py",
    "penalty/test_determinism.py",
    "conformance/test_numbers.py",
    "rollout/test_rollout_oracle.py",
)
OF_ROWS = ("logits/test_logits_extreme.py", "logits/test_logits_accuracy.py")
NAMES = (
    "native and not emulated and not cuda and "
    "(sweep or every_pass or neighbours or company or binary_kl or exponentials or near_and_far or "
    "(any_two or bits_and) and (penalty- or rewards- or rollout-))"
)
RUN = """
import sys, pytest
from klfast import _C
print("uses", _C.instruction_set(), flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


AT_0 = (
    "penalty/test_accuracy.py",
    "logits/test_logits_accuracy.py",
    "logits/test_topk.py",
    "logits/test_shards.py",
    "linear/test_linear_chunks.py",
)

exhaustive = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _needs_native():
    reason = backends.BACKENDS["native"].why_not(torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)


def run(options, files, **environment):
    paths = [str(FOLDER / file) for file in files]
    return subprocess.run(
        [sys.executable, "-c", RUN, "-q", "-x", "-p", "no:cacheprovider", *options, *paths],
        env=os.environ | environment,
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def assert_passes(instruction_set, part, names, files):
    """Run the tests of a name with a set's kernels. A set that is not here is skipped."""
    from klfast import _C

    if instruction_set == _C.instruction_set():
        pytest.skip(f"{instruction_set}: what this process uses, and every other file tests")
    done = run(["-m", part, "-k", names], files, KLFAST_CPU=instruction_set)
    lacks = re.search(r"which this (processor|build) does not have", done.stderr)
    if lacks:
        pytest.skip(f"this {lacks[1]} does not have {instruction_set}")
    assert f"uses {instruction_set}\n" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


every_part = pytest.mark.parametrize(
    "part", ["not exhaustive", pytest.param("exhaustive", marks=exhaustive)]
)


@pytest.mark.long
@every_part
@pytest.mark.parametrize(
    "instruction_set",
    ["baseline", *(pytest.param(s, marks=exhaustive) for s in ("avx2", "avx512"))],
)
def test_every_instruction_set_keeps_the_promises(instruction_set, part):
    assert_passes(instruction_set, part, NAMES, TESTS)


@pytest.mark.long
@every_part
@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_sums_rows_with_peaks(instruction_set, part):
    """The sets differ where the terms of a row's sums reach the limit of their exponential."""
    names = "native and not emulated and not cuda and (peaks or confident)"
    assert_passes(instruction_set, part, names, OF_ROWS)


@pytest.mark.long
@pytest.mark.parametrize(
    "capability", ["default", *(pytest.param(c, marks=exhaustive) for c in ("avx2", "avx512"))]
)
def test_the_reference_is_0_at_equal_inputs_with_any_vectors_of_torch(capability):
    """It is never negative either, by its formulas and not by the rounding of exp and log."""
    here = ("DEFAULT", "AVX2", "AVX512")
    if torch.backends.cpu.get_cpu_capability() not in here[here.index(capability.upper()) :]:
        pytest.skip(f"torch has no {capability} kernels for this processor")
    name = "reference and (identical or negative or is_the_teacher)"
    done = run(["-k", name], AT_0, ATEN_CPU_CAPABILITY=capability)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
