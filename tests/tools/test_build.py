"""Properties of the build, and its errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from klfast.ops import load

FOLDER = "build/klfast-" + str(sysconfig.get_config_var("SOABI"))
KERNELS = sorted((Path(__file__).parents[2] / FOLDER).glob("*_cpu_kernel.cpp_avx*.o"))


SETUP = """
import runpy, sys
sys.modules.update(dict.fromkeys({missing}))
sys.argv = ["setup.py", "build_ext", "--build-lib", "nowhere", "--build-temp", "nowhere"]
runpy.run_path("setup.py")
"""


@pytest.mark.parametrize(
    "missing", ["torch", pytest.param("compiler", marks=pytest.mark.exhaustive)]
)
def test_what_a_build_lacks_is_named_with_its_remedy(missing):
    modules = [] if missing == "compiler" else [missing]
    done = subprocess.run(
        [sys.executable, "-c", SETUP.format(missing=modules)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CXX": "/nonexistent/c++", "FORCE_CUDA": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    expected = f"klfast needs {missing} to build: pip install torch pybind11 ninja setuptools"
    if missing == "compiler":
        expected = "klfast needs a C++ compiler to build, and there is no /nonexistent/c++: install"
    assert done.stderr.splitlines()[-1].startswith(expected)
    assert "Traceback" not in done.stderr


OWN_RUNTIME = """
import pathlib, runpy, sys
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py")["check_runtime"](pathlib.Path({module!r}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have one C++ runtime")
@pytest.mark.parametrize("needed", [b"libstdc++.so.6", b"libc.so.6"])
def test_a_cpp_runtime_of_its_own_is_refused(tmp_path, needed):
    """The errors of its ops would have no text, or end the process."""
    module = tmp_path / "_C.so"
    module.write_bytes(needed)
    code = OWN_RUNTIME.format(module=str(module))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    is_shared = needed.startswith(b"libstdc++")
    assert (done.returncode == 0) == module.exists() == is_shared
    assert is_shared or "CXX must link the shared libstdc++" in done.stderr


def test_the_extension_is_of_these_sources():
    assert load.load_error() is None
    assert load.extension().TABLES == load.TABLES


@pytest.mark.parametrize("table", load.TABLES)
def test_an_extension_of_other_tables_is_refused(table, monkeypatch):
    """The sources have a new row that the extension lacks, for example."""
    monkeypatch.setitem(load.TABLES, table, "another")
    with pytest.raises(ImportError, match=r"another.*rebuild it with pip install"):
        load._load()


@pytest.mark.skipif(
    not KERNELS or shutil.which("nm") is None, reason="no x86 build folder, or no nm"
)
@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_code_for_newer_processors_shares_no_symbol(path: Path):
    """The linker keeps one copy of a weak symbol. An AVX-512 copy would stop older machines."""
    symbols = subprocess.run(
        ["nm", "--defined-only", path], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    shared = [line for line in symbols if line.split()[-2] in ("W", "V", "u")]
    exported = [line.split()[-1] for line in symbols if line.split()[-2] in ("T", "D", "R")]
    assert shared == []
    assert len(exported) == 1, "the table of kernels"
