"""Tests the installed klfast with the interpreter that runs this, outside of any checkout.

Some tests are copied to a folder of their own and run there, so that Python can find no other
klfast. They test the kernels' accuracy on every instruction set, the command line, and the folder
from which klfast was imported. They need hypothesis, mpmath, numpy and pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1].resolve()
TESTS = (
    "penalty/test_accuracy.py",
    "penalty/test_instruction_sets.py",
    "logits/test_logits_accuracy.py",
    "rollout/test_rollout_oracle.py",
)
# Tests that test_instruction_sets.py runs in processes of its own.
BESIDE = (
    "conformance/families.py",
    "conformance/test_numbers.py",
    "linear/test_linear_chunks.py",
    "logits/test_logits_extreme.py",
    "logits/test_shards.py",
    "logits/test_topk.py",
    "penalty/test_determinism.py",
)
# Not with the emulator, which compiles the checkout's sources.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-k", "not emulated", "-m", "not exhaustive")


def copy_tests(folder: Path) -> None:
    """Copies only those files of the checkout that the tests read."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "tests" / "support", folder / "tests" / "support")
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    for test in (*TESTS, *BESIDE):
        (folder / "tests" / test).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / test, folder / "tests" / test)
    shutil.copy(ROOT / "release" / "installed.py", folder / "tests" / "test_installed.py")


def main() -> int:
    hidden = {"PYTHONPATH", "PYTHONHOME", "KLFAST_COMMIT", "KLFAST_CPU"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        copy_tests(folder)
        tests = ["tests/test_installed.py", *(f"tests/{test}" for test in TESTS)]
        command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
