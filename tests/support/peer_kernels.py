"""The frameworks' own Triton kernels on a CPU: Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import torch


def interpreted(script, calls, folder, *options):
    """The outputs of ``script INPUTS OUTPUTS`` for the calls, which it finds in the file INPUTS.

    Triton decides at its import whether it compiles or interprets. ``options``: of Python.
    """
    inputs, outputs = folder / "inputs.pt", folder / "outputs.pt"
    torch.save(calls, inputs)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *options, "-W", "ignore", str(script), str(inputs), str(outputs)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(outputs)
