"""Python in a fresh process: for what a process can do only once, or may not survive."""

import os
import subprocess
import sys


def run_fresh(code, *options, arguments=(), timeout=60, **environment):
    """Standard output of ``python *options -c code *arguments``, which must exit with 0."""
    process = subprocess.run(
        [sys.executable, *options, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
