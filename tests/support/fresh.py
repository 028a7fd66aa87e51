"""Python in a fresh process, for code that runs only once or may end its process."""

import os
import subprocess
import sys


def run_fresh(code, *options, arguments=(), timeout=60, **environment):
    """Run ``python *options -c code *arguments`` and return its output."""
    process = subprocess.run(
        [sys.executable, *options, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
