"""Compiles small programs over one header of ``csrc``."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "c++"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Compile a program of this folder. Return a function of its arguments and input, which returns
    its output lines.
    """
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"needs a C++ compiler, has no {COMPILER[0]!r}")
    folder = tmp_path_factory.mktemp("formulas")

    def compile_program(name, *flags):
        source = Path(__file__).with_name(f"{name}.cpp")
        flags = ["-std=c++17", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}", *flags]
        subprocess.run([*COMPILER, *flags, str(source), "-o", str(folder / name)], check=True)

        def run(*arguments, given=""):
            command = [str(folder / name), *arguments]
            options = {"input": given, "capture_output": True, "text": True, "check": True}
            return subprocess.run(command, **options).stdout.splitlines()

        return run

    return compile_program
