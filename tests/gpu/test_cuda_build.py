"""The CUDA extension without a GPU.

Every kernel compiles for every architecture, with warnings as errors and without spills. The module
loads beside a torch without CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import check_wheel
import pytest
import torch
from filelock import FileLock
from fresh import run_fresh

from benchmarks import sass

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))

pytestmark = [
    pytest.mark.exhaustive,  # minutes: every kernel for every architecture
    pytest.mark.skipif(
        not (HOME / "bin" / "nvcc").exists(),
        reason="no CUDA toolkit at CUDA_HOME or /usr/local/cuda",
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the package, built with the toolkit for any torch.

    All processes of pytest-xdist share one build, because their folders have the same parent.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cuda"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            build(folder)
    return folder


def build(folder):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    process = subprocess.run(
        [*install, "--no-build-isolation", "--target", str(folder), str(ROOT)],
        env={**os.environ, "CUDA_HOME": str(HOME), "FORCE_CUDA": "1", "WERROR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in process.stderr.splitlines() if "error" in line.lower()]
    assert process.returncode == 0, "\n".join(errors)


def in_built(folder, code):
    return run_fresh(code, PYTHONPATH=str(folder), PYTHONSAFEPATH="1")


def test_the_build_says_what_it_was_built_for(built):
    facts = json.loads((built / "klfast" / "_build_info.json").read_text())
    assert facts["cuda"]
    assert facts["cuda_archs"][-1].endswith("+PTX")
    assert {arch.removesuffix("+PTX") for arch in facts["cuda_archs"]} >= {"8.0", "9.0"}


def test_what_was_built_names_no_path_of_this_machine(built):
    facts = json.loads((built / "klfast" / "_build_info.json").read_text())
    assert not [text for text in check_wheel.strings_of(facts) if "/" in text]
    (module,) = (built / "klfast").glob("_C*.so")
    assert [*check_wheel.faults_of_module(module.read_bytes())] == []


LOADS = """
import os, torch, klfast
from klfast.ops.load import load_error
assert load_error() is None, load_error()
assert klfast.__file__.startswith(os.environ["PYTHONPATH"])
for op in ("kl_penalty_fwd", "kl_penalty_bwd", "token_weights", "scale_"):
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"klfast::{op}", key), (op, key)
print(klfast.kl_penalty(torch.zeros(2, 3), torch.ones(2, 3), estimator="k1").sum().item())
"""


def test_the_module_loads_on_any_torch_and_knows_both_devices(built):
    assert in_built(built, LOADS) == "-6.0"


def test_without_a_driver_it_says_why_not(built):
    problem = in_built(built, "import torch; from klfast import _C; print(_C.cuda_problem())")
    if torch.cuda.is_available():
        assert problem == ""
    elif torch.version.cuda is None:
        assert problem == "this torch has no CUDA streams"
    else:
        assert problem.startswith("the CUDA kernels cannot run: ")
        assert "the driver offers" in problem


@pytest.fixture(scope="module")
def counts(built):
    return sass.counts_of(next((built / "klfast").glob("_C*.so")))


@pytest.mark.parametrize("name", sass.CASES)
def test_the_loops_of_a_kernel_have_no_more_instructions_than_its_bound(counts, name):
    assert counts[name].loop[sass.FIRST] <= sass.CASES[name].bound


@pytest.mark.parametrize("name", [name for name in sass.CASES if name.startswith("k3-")])
def test_a_b200_takes_two_tokens_in_an_instruction(counts, name):
    loop = counts[name].loop
    assert loop["B200"] < 0.92 * loop["H200"]


def test_the_table_of_instructions_is_of_these_kernels(counts):
    table = json.loads((sass.RESULTS / "sass.json").read_text())["cases"]
    assert table.keys() == counts.keys()
    for name, count in counts.items():
        assert table[name]["loop"] == pytest.approx(count.loop, rel=0.05), name
        assert table[name]["registers"] == pytest.approx(count.registers, abs=8), name
        assert table[name]["warps"] == count.warps, name
        assert table[name]["code"] == pytest.approx(count.code, rel=0.05), name
