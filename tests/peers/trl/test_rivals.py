"""How the benchmark calls Liger's and TRL's functions over logits, whose kernels run in Triton's
interpreter, and from hidden states, which run in PyTorch on a CPU.
"""

import os
import subprocess
import sys

import pytest

from benchmarks import rivals

# Liger's KLDiv calls a method of a scalar that only a compiled kernel's has.
NOT_INTERPRETED = {("Liger", "kl")}
CALLS = [(name, op) for name, forwards in rivals.installed()[0].items() for op in forwards]


def test_both_libraries_are_here():
    assert {name for name, _ in CALLS} == {"Liger", "TRL"}


@pytest.mark.parametrize(("library", "op"), [c for c in CALLS if c not in NOT_INTERPRETED])
def test_a_call_is_right(library, op):
    code = f"""
from benchmarks import rivals
from benchmarks.cases import DTYPES, Case, make_inputs
from benchmarks.candidates import candidate
from benchmarks.measure import check_candidates
from benchmarks.suites import OPS

op = OPS[{op!r}]
call = candidate(op, rivals.installed()[0][{library!r}][{op!r}])
shape = (3, 16, 1100) if op.name.startswith("linear") else (3, 1100)
for dtype in DTYPES:
    inputs = make_inputs(Case(op, dtype, shape), 1)[0]
    assert check_candidates({{"it": call}}, op, inputs)
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "right\n", done.stderr
