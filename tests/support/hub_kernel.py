"""The generator of the kernel in ``hub/``, and processes that load the kernel with ``kernels``."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HUB = ROOT / "hub"
REPOSITORY = "klfast/klfast"

sys.path.insert(0, str(HUB))
import generate  # noqa: E402
import sources  # noqa: E402
import variants  # noqa: E402

__all__ = ["HUB", "REPOSITORY", "ROOT", "generate", "run", "sources", "variants"]


def run(kernel, *arguments, **environment):
    """Run Python in a fresh process that finds a kernel's folder as the Hub. Return its output."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "LOCAL_KERNELS": f"{REPOSITORY}={kernel}",
        "PYTHONPATH": os.pathsep.join(path),
        **environment,
    }
    process = subprocess.run(
        [sys.executable, *arguments], cwd=kernel, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.strip()
