"""Tests of an installed klfast, which `release/check_installed.py` runs."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import torch

import klfast
from klfast import _C

SITE = Path(sysconfig.get_path("platlib")).resolve()


def test_klfast_and_its_module_are_the_installed_ones():
    for module in (klfast, _C):
        assert Path(module.__file__).resolve().parent == SITE / "klfast"


def test_the_record_has_the_version():
    assert metadata.version("klfast").partition("+")[0] == klfast.__version__


def test_the_command_says_that_the_kernels_work():
    command = Path(sysconfig.get_path("scripts")) / "klfast"
    process = subprocess.run(
        [command, "info", "--json"], capture_output=True, text=True, check=True
    )
    facts = json.loads(process.stdout)
    assert facts["extension"] is None
    assert facts["backends"]["cpu"]["auto"] == "native"
    assert facts["versions"]["torch"] == torch.__version__
    assert len(facts["build"]["commit"].partition("-")[0]) == 40


def test_it_is_typed():
    assert (SITE / "klfast" / "py.typed").exists()
    assert (SITE / "klfast" / "_C.pyi").exists()


def test_an_import_brings_torch_and_nothing_optional():
    code = "import sys, klfast; print(*{'triton', 'numpy', 'rich'} & {*sys.modules})"
    before = subprocess.run(
        [sys.executable, "-c", code.replace("klfast", "torch")], capture_output=True, text=True
    ).stdout
    after = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert set(after.split()) <= set(before.split())
