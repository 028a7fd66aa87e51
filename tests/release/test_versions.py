"""The version and the supported Pythons are the same in every place that names them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import check_versions
import pytest
import yaml
from setuptools.config.pyprojecttoml import read_configuration

import klfast

ROOT = Path(__file__).parents[2]
PROJECT = read_configuration(ROOT / "pyproject.toml", expand=False)
PYTHONS = [f"3.{minor}" for minor in range(10, 15)]


def test_the_version_stands_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"] == {
        "version": {"attr": "klfast.version.__version__"}
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", klfast.__version__)


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == klfast.__version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_pythons_of_the_package():
    prefix = "Programming Language :: Python :: "
    classifiers = PROJECT["project"]["classifiers"]
    listed = [line.removeprefix(prefix) for line in classifiers if line.startswith(prefix + "3.")]
    assert listed == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("Makefile", f"({PYTHONS[0]} to {PYTHONS[-1]})"),
        ("CONTRIBUTING.md", f"Python {PYTHONS[0]} to {PYTHONS[-1]}"),
        ("docs/stability.md", f"| Python | {PYTHONS[0]} to {PYTHONS[-1]} |"),
        ("docs/install.md", f"CPython {PYTHONS[0]} to {PYTHONS[-1]}"),
    ],
)
def test_pythons_in_words(path, text):
    assert text in (ROOT / path).read_text()


def test_pythons_that_are_checked():
    assert [name.removeprefix("python") for name in check_versions.PYTHONS] == PYTHONS
    oldest = PROJECT["project"]["dependencies"][0].removeprefix("torch>=")
    assert f"{oldest}.0" in check_versions.TORCHES


# cibuildwheel for Python 3.10 is older than Python 3.14.
@pytest.mark.exhaustive
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs a cibuildwheel that knows cp314")
@pytest.mark.parametrize(
    ("platform", "options", "tag"),
    [
        ("linux", ["--archs", "x86_64"], "manylinux_x86_64"),
        ("linux", ["--archs", "aarch64"], "manylinux_aarch64"),
        ("macos", [], "macosx_arm64"),
    ],
)
def test_wheels_of_a_release(platform, options, tag):
    command = ["cibuildwheel", "--print-build-identifiers", "--platform", platform, *options]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(ROOT)], capture_output=True, text=True, check=True
    )
    names = [f"cp{python.replace('.', '')}-{tag}" for python in PYTHONS]
    assert done.stdout.split() == names


def test_tools_that_build_wheels_are_pinned():
    pins = (ROOT / "constraints.txt").read_text()
    build = PROJECT["tool"]["cibuildwheel"]["before-build"]
    assert "--constraint {package}/constraints.txt" in build
    for tool in build.partition("constraints.txt")[2].split():
        assert re.search(rf"^{tool}==", pins, re.MULTILINE), tool


def test_what_cibuildwheel_runs_is_there():
    settings = PROJECT["tool"]["cibuildwheel"]
    for name in ("repair-wheel-command", "test-command"):
        (script,) = re.findall(r"\{package\}/(\S+)", settings[name])
        assert (ROOT / script).exists()
    assert tuple(settings["test-requires"]) == check_versions.TOOLS


def test_the_page_has_the_record():
    table = check_versions.table(json.loads(check_versions.RECORD.read_text()))
    begin, end = check_versions.BEGIN, check_versions.END
    assert check_versions.PAGE.read_text().partition(begin)[2].partition(end)[0] == table
