"""The sdist is the tree, so everything can be built, documented and tested from it."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import artifacts
import pytest

import klfast

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.exhaustive
MADE = {"PKG-INFO", "setup.cfg", "COMMIT"}


def git(*arguments):
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a checkout: in an sdist there is nothing to compare with")
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, made with a label for wheels set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLFAST_LOCAL_VERSION", "cu130")
        return artifacts.make_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def files(sdist):
    """Contents by path."""
    with tarfile.open(sdist) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read()
            for member in archive.getmembers()
            if member.isfile()
        }


def test_it_has_every_file_of_the_tree_and_no_other(files):
    tracked = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    there = {path for path in tracked if (ROOT / path).exists()}
    assert {path for path in files if not path.startswith("klfast.egg-info/")} == there | MADE


def test_it_says_which_commit_it_is_of(files):
    assert files["COMMIT"].decode().partition("-")[0].strip() == git("rev-parse", "HEAD").strip()


BUILD_INFO = """
import json, runpy, setuptools
setuptools.setup = lambda **options: None
facts = runpy.run_path("setup.py")
print(json.dumps(facts["build_info"]([])))
"""


def test_a_build_from_it_says_its_commit_and_no_path(files, tmp_path):
    """The folder is inside another project's checkout, which has a commit too."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    folder = tmp_path / "klfast"
    folder.mkdir()
    for path in ("setup.py", "COMMIT"):
        (folder / path).write_bytes(files[path])
    command = [sys.executable, "-c", BUILD_INFO]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    info = json.loads(done.stdout)
    assert info["commit"] == files["COMMIT"].decode().strip()
    assert str(tmp_path) not in done.stdout
    (folder / "COMMIT").unlink()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["commit"] is None


def test_an_sdist_takes_no_label(tmp_path, monkeypatch):
    """KLFAST_LOCAL_VERSION is for wheels. A label in an sdist would stick to its wheels."""
    monkeypatch.setenv("KLFAST_LOCAL_VERSION", "cu130")
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "KLFAST_LOCAL_VERSION is for wheels" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("label", ["cu130.x86", "CU130"])
def test_a_label_is_in_the_version_of_a_wheel(sdist, tmp_path, label):
    """The sdist's setup.cfg says that there is no label."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info"],
        cwd=tree,
        env={**os.environ, "KLFAST_LOCAL_VERSION": label},
        capture_output=True,
        text=True,
        check=False,
    )
    if label.islower():
        assert (
            f"\nVersion: {klfast.__version__}+{label}\n"
            in (tree / "klfast.egg-info" / "PKG-INFO").read_text()
        )
    else:
        assert done.returncode
        assert f"KLFAST_LOCAL_VERSION must be as 'cu130', got {label!r}" in done.stderr
