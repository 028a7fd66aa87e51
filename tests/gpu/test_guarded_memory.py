"""No kernel reads beyond its inputs, on the CPU and in the emulated CUDA kernels."""

import sys
from pathlib import Path

import pytest
from fresh import run_fresh

SUPPORT = str(Path(__file__).parents[1] / "support")
TARGETS = ("native", "native-emulated")


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of Linux")
@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "step"),
    [
        pytest.param("native", 5, id="native-some"),
        *(pytest.param(t, 1, id=t, marks=pytest.mark.exhaustive) for t in TARGETS),
    ],
)
def test_every_function_reads_its_own_memory_alone(target, step, record_property):
    """A read outside ends the process, and the last line names the call."""
    code = "import sys, guarded; guarded.main(sys.argv[1], int(sys.argv[2]))"
    arguments = (target, str(step))
    ran = run_fresh(code, "-W", "ignore", arguments=arguments, timeout=600, PYTHONPATH=SUPPORT)
    assert int(ran) > 1000 // step
    if step == 1:
        record_property("guarded", int(ran))
