"""The commit of the running klfast: its own checkout's or its build's."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import klfast
from klfast.backends import info as provenance


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a folder of its own, where git has no other configuration."""
    folder = tmp_path / "site" / "klfast"
    folder.mkdir(parents=True)
    shutil.copy(Path(klfast.__file__).with_name("version.py"), folder)
    monkeypatch.setattr(provenance, "_PACKAGE", folder)
    monkeypatch.delenv("KLFAST_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return folder


def git(folder, *arguments):
    user = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    command = ["git", *user, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def commit_all(folder):
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--message", "all")
    return git(folder, "rev-parse", "HEAD").strip()


def test_a_checkout_has_its_commit_and_whether_it_was_changed(package):
    git(package.parent, "init")
    head = commit_all(package.parent)
    assert head.startswith(provenance.commit())
    (package / "version.py").write_text("changed")
    assert provenance.commit() == f"{head[:7]}-dirty"


def test_an_installed_package_has_its_builds_commit(package):
    assert provenance.commit() is None
    assert provenance.described() == f"{klfast.__version__}, commit not known"
    (package / "_build_info.json").write_text(json.dumps({"commit": "0123456789abcdef"}))
    assert provenance.commit() == "0123456"
    (package / "_build_info.json").write_text(json.dumps({"commit": "0123456789abcdef-dirty"}))
    assert provenance.commit() == "0123456-dirty"


def test_the_checkout_that_an_environment_lies_in_is_not_klfasts(package):
    git(package.parents[1], "init")
    (package.parents[1] / "notes.txt").write_text("of another project")
    (package.parents[1] / ".gitignore").write_text("site\n")
    git(package.parents[1], "add", "notes.txt", ".gitignore")
    git(package.parents[1], "commit", "--message", "another project's")
    assert provenance.commit() is None


def test_sources_without_history_are_not_those_of_a_build(package):
    (package / "_build_info.json").write_text(json.dumps({"commit": "0123456789abcdef"}))
    (package.parent / "setup.py").write_text("")
    assert provenance.commit() is None
