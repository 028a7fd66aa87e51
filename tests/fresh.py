"""Python in a fresh process: for what a process can do only once, or may not survive."""

import os
import subprocess
import sys


def run_fresh(code, *options, timeout=60, **environment):
    """Standard output of ``python *options -c code``, which must exit with 0."""
    process = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
