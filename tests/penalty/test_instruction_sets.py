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
    done = run(["-m", part, "-k", NAMES], TESTS, KLFAST_CPU=instruction_set)
    lacks = re.search(r"which this (processor|build) does not have", done.stderr)
    if lacks:
        pytest.skip(f"this {lacks[1]} does not have {instruction_set}")
    assert f"uses {instruction_set}\n" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "capability",
    ["default", *(pytest.param(c, marks=exhaustive) for c in ("avx2", "avx512"))],
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
