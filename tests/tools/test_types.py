"""A user's type checker sees klfast's types from an installation, not from its sources."""

import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = Path(__file__).parent / "typed"
SITE = sysconfig.get_path("purelib")
LAY_OUT = ["egg_info", "--egg-base"]
STRICT = ["--strict", "--no-error-summary", "--hide-error-context", "--no-pretty"]


def test_the_user_s_file_runs(capsys):
    runpy.run_path(str(TYPED / "project.py"), run_name="__main__")
    assert "coef" in capsys.readouterr().out


def is_editable():
    try:
        origin = importlib.metadata.distribution("klfast").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(json.loads(origin or "{}").get("dir_info", {}).get("editable"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's project, and the checkers' caches."""
    folder = tmp_path_factory.mktemp("project")
    for path in TYPED.glob("*.py"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment with klfast's files as in a wheel, and this one's packages."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    subprocess.run(
        [sys.executable, "setup.py", "-q", *LAY_OUT, folder, "build_py", "--build-lib", site],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert (site / "klfast" / "py.typed").exists()
    (site / "beside.pth").write_text(SITE)
    return python


@pytest.fixture(params=["editable", "wheel"])
def python(request):
    """The Python of an installation of klfast."""
    if request.param == "wheel":
        return request.getfixturevalue("installed")
    if not is_editable():
        pytest.skip("klfast is not installed in editable mode here")
    return Path(sys.executable)


def errors(command, folder, name):
    """Line -> messages of a checker's errors in a user's file."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    process = subprocess.run(
        [*command, name], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode in (0, 1), process.stdout + process.stderr
    found = re.findall(rf"{name}:(\d+).*? error: (.*)", process.stdout)
    assert bool(found) == bool(process.returncode), process.stdout + process.stderr
    return {int(line): message for line, message in found}


def mistakes():
    """The lines with a mistake, which are expressions."""
    lines = (TYPED / "mistakes.py").read_text().splitlines()
    return {n for n, line in enumerate(lines, 1) if line.startswith(("klfast.", "Estimator("))}


@pytest.mark.exhaustive  # a minute: mypy reads torch
def test_mypy_finds_no_error_and_every_mistake(folder, python):
    """``mypy --strict``."""
    command = [sys.executable, "-m", "mypy", *STRICT, "--python-executable", python]
    command += ["--cache-dir", folder / "mypy"]
    assert errors(command, folder, "project.py") == {}
    assert set(errors(command, folder, "mistakes.py")) == mistakes()


@pytest.mark.exhaustive
@pytest.mark.skipif(
    importlib.util.find_spec("basedpyright") is None, reason="pip install klfast[dev] has it"
)
def test_pyright_finds_no_error_and_every_mistake(folder, python):
    """The strict mode of pyright, from a package that brings node.

    pyright's own package downloads both at its first run.
    """
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = [Path(sys.executable).parent / "basedpyright", "--level", "error"]
    command += ["--pythonpath", python]
    assert errors(command, folder, "project.py") == {}
    assert set(errors(command, folder, "mistakes.py")) == mistakes()
