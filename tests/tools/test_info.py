"""``klfast info``, ``klfast.info``, and the commit of a checkout or of a build."""

import contextlib
import json
import shutil
import subprocess
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch
from setuptools.config.pyprojecttoml import read_configuration

import klfast
from klfast import backends
from klfast.__main__ import main
from klfast.backends import info as provenance
from klfast.types.device import DEVICES


def test_info_is_json_and_names_a_backend_for_the_cpu():
    facts = json.loads(json.dumps(klfast.info()))
    assert facts["versions"]["torch"] == torch.__version__
    cpu = facts["backends"]["cpu"]
    assert list(cpu["why_not"]) == list(backends.BACKENDS)
    assert cpu["why_not"][cpu["auto"]] is None
    assert backends.resolve("auto", torch.device("cpu")) is backends.BACKENDS[cpu["auto"]]


def test_info_describes_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    facts = klfast.info()
    assert facts["devices"]["cuda:1"] == {"name": "GPU 1", "capability": "9.1"}
    assert list(facts["backends"]) == ["cpu", "cuda:0", "cuda:1"]
    for choice in facts["backends"].values():
        assert list(choice["why_not"]) == list(backends.BACKENDS)
        assert choice["why_not"][choice["auto"]] is None


def test_a_gpu_serves_triton_by_its_row_its_compiler_and_its_float64(monkeypatch):
    """As Intel's would, whose compute capability is a dict."""
    pytest.importorskip("triton")
    names = {"device_count": lambda: 1, "get_device_name": lambda index: "Max"}
    module = types.SimpleNamespace(**names, get_device_capability=lambda index: {"version": "1"})
    row = DEVICES["xpu"]._replace(module=module, triton="intel", lacks_float64=None)
    for lacks, reason, own in (
        (None, None, ["amd", "intel"]),
        (lambda device: True, "float64", ["intel"]),
        (None, "compiles for amd and not for intel; run pip install triton", ["amd"]),
        (None, "compiles for no GPU and not for intel", []),
    ):
        monkeypatch.setattr("triton.backends.backends", dict.fromkeys(own))
        monkeypatch.setitem(DEVICES, "xpu", row._replace(lacks_float64=lacks))
        facts = klfast.info()
        assert facts["devices"] == {"xpu:0": {"name": "Max", "capability": None}}
        assert facts["backends"]["xpu:0"]["auto"] == ("reference" if reason else "triton")
        found = facts["backends"]["xpu:0"]["why_not"]["triton"]
        assert found is reason is None or reason in found


def test_the_version_is_that_of_the_package_and_needs_no_install_record(monkeypatch):
    project = read_configuration(Path(__file__).parents[2] / "pyproject.toml")["project"]
    assert klfast.__version__ == project["version"]
    monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    versions = klfast.info()["versions"]
    assert versions["klfast"] == klfast.__version__
    assert versions["triton"] is None


@pytest.mark.parametrize("failure", [None, "the extension was not built"], ids=["loads", "fails"])
def test_the_text_says_ok_or_why_not(monkeypatch, capsys, failure):
    facts = klfast.info()
    assert facts["extension"] is None, "the tests need the extension"
    assert facts["cpu"] in facts["build"]["instruction_sets"]
    monkeypatch.setattr("klfast.ops.load.load_error", lambda: failure)
    facts = klfast.info()
    assert facts["extension"] == failure
    assert (facts["cpu"] is None) == (failure is not None)
    assert facts["backends"]["cpu"]["auto"] == ("reference" if failure else "native")
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"extension: {failure or 'ok'}" in lines
    assert "    reference: ok" in lines
    native = next(line for line in lines if line.startswith("    native: "))
    assert (native == "    native: ok") == (failure is None)
    assert failure is None or failure in native
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts


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
