"""CHANGELOG.md has its form, and the script that checks it finds each fault."""

import os
import subprocess
import sys
from pathlib import Path

import changelog
import pytest

import klfast

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "release" / "changelog.py"

GOOD = """# Changelog

The format is that of Keep a Changelog.

## [Unreleased]

### Added

- Something.

## [0.2.0] - 2026-03-01

### Changed

- A thing,
  over two lines.

### Fixed

- A fault.

## [0.1.0] - 2026-02-01

### Added

- The first.
"""


def test_the_changelog_has_its_form():
    assert changelog.faults((ROOT / "CHANGELOG.md").read_text(), klfast.__version__) == []


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0", "1.0.0"])
def test_a_good_one_has_no_fault(version):
    assert changelog.faults(GOOD, version) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("# Changelog\n", "# Changes\n", "it must begin with"),
        ("[0.1.0] - 2026-02-01", "[0.1.0]", "must be '## [Unreleased]' or '## [1.2.3]"),
        ("2026-02-01", "2026-02-30", "has no date such as"),
        ("[0.1.0]", "[0.2.0]", "versions must descend"),
        ("## [0.1.0] - 2026-02-01", "## [Unreleased]", "must be the first section"),
        ("### Changed", "### Improved", "'### Improved' must be one of"),
        ("- The first.", "The first.", "there must be a list"),
        ("### Added\n\n- The first.\n", "", "[0.1.0] - 2026-02-01 says nothing"),
    ],
)
def test_a_fault_is_found(old, new, fault):
    assert old in GOOD
    head, _, tail = GOOD.rpartition(old)
    assert any(fault in found for found in changelog.faults(head + new + tail, "0.2.0"))


def test_a_version_needs_a_section():
    released = GOOD.replace("## [Unreleased]\n\n### Added\n\n- Something.\n\n", "")
    assert changelog.faults(released, "0.2.0") == []
    assert changelog.faults(released, "0.3.0") == [
        "it must have a section [Unreleased] or one of 0.3.0"
    ]
    assert "older than the newest" in changelog.faults(GOOD, "0.1.0")[0]


def test_a_tag_is_that_of_the_newest_section():
    released = GOOD.replace("## [Unreleased]\n\n### Added\n\n- Something.\n\n", "")
    assert changelog.not_ready(released, "0.2.0", "v0.2.0") is None
    assert "the tag is v0.2.1" in changelog.not_ready(released, "0.2.0", "v0.2.1")
    assert "the tag is 0.2.0" in changelog.not_ready(released, "0.2.0", "0.2.0")
    assert "must be of 0.2.0, is '## [Unreleased]'" in changelog.not_ready(GOOD, "0.2.0", "v0.2.0")


# `since`, on made-up repositories


def git(folder, *arguments):
    user = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    command = ["git", *user, *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def commit(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("a") as file:
            file.write("a line\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--message", "a change")


def since(folder, reference="main"):
    """Exit status and message."""
    command = [sys.executable, SCRIPT, "since", reference]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.strip()


@pytest.fixture
def branch(tmp_path, monkeypatch):
    """A branch of a repository, off main."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git(tmp_path, "init", "--initial-branch", "main")
    commit(tmp_path, "CHANGELOG.md", "klfast/functional/penalty.py", "csrc/a.h", "docs/index.md")
    git(tmp_path, "checkout", "-b", "branch")
    return tmp_path


def test_the_package_needs_a_line(branch):
    path = "csrc/a.h"
    commit(branch, "docs/index.md", "tests/test_it.py", "examples/klfast/a.py")
    assert since(branch) == (0, "")
    commit(branch, path)
    assert since(branch) == (1, f"CHANGELOG.md has no line about the change to {path}")
    commit(branch, "CHANGELOG.md")
    assert since(branch) == (0, "")


def test_what_changed_on_main_is_not_the_branchs(branch):
    commit(branch, "docs/index.md")
    git(branch, "checkout", "main")
    commit(branch, "klfast/functional/penalty.py")
    git(branch, "checkout", "branch")
    assert since(branch) == (0, "")
