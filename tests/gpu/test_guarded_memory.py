"""No kernel reads beyond its inputs: on the CPU, and the CUDA kernels emulated."""

import sys
from pathlib import Path

import pytest
from fresh import run_fresh

SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of Linux")
@pytest.mark.long
@pytest.mark.parametrize(
    "target", ["native", pytest.param("native-emulated", marks=pytest.mark.exhaustive)]
)
def test_every_function_reads_its_own_memory_alone(target, record_property):
    """A read outside ends the process; the last line names the call."""
    code = "import sys, guarded; guarded.main(sys.argv[1])"
    ran = run_fresh(code, "-W", "ignore", arguments=(target,), timeout=600, PYTHONPATH=SUPPORT)
    assert int(ran) > 2000
    record_property("guarded", int(ran))
