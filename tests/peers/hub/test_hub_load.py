"""The kernel as users have it: ``kernels`` loads it from a folder, without klfast or a network.

Its own tests (``hub/tests``) and klfast's tests for Triton's interpreter run on it.
"""

import math
import re
import shutil
from pathlib import PurePosixPath

import hub_kernel
import pytest
import readme
from hub_kernel import sources, variants

long = pytest.mark.long
exhaustive = pytest.mark.exhaustive

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist")
OWN = (*PYTEST, "-p", "hub_alone", "-o", "markers=kernels_ci: of the kernel's CI", "tests")
INTERPRETED = {"TRITON_INTERPRET": "1"}


def passed(output):
    """The summary of pytest's output, without its time."""
    return re.sub(r" in [\d.]+s.*", "", output.splitlines()[-1])


def test_it_runs_without_klfast_and_without_a_network(kernel):
    """The reference serves on a CPU, and the user's own line gets the warning."""
    code = """
import hub_alone, importlib.util, pathlib, sys, warnings
import kernels, torch

klfast = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
with warnings.catch_warnings(record=True) as warned:
    options = {"estimator": "k2", "reduction": "token-sum", "return_stats": True}
    value, stats = klfast.kl_penalty(logprobs, torch.tensor([[-1.5, -2.0]]), **options)
value.backward()
print(value.item(), logprobs.grad.tolist(), klfast.__version__)
print(*(f"{w.category.__name__} {w.filename} {w.message}" for w in warned), sep="; ")
print(repr(stats).replace(klfast.__name__, ""))
print([name for name in sys.modules if name.partition(".")[0] in ("klfast", "triton")])
for name in klfast.__all__:
    getattr(klfast, name)
    """
    numbers, warned, stats, loaded = hub_kernel.run(kernel, "-c", code, kernel).splitlines()
    assert numbers == "0.125 [[0.5, 0.0]] 0.1.0"
    assert warned.startswith(
        "RuntimeWarning <string> klfast uses its slow reference backend on cpu"
    )
    assert stats.startswith("KLStats(sequences=1, token_mean()=0.0625, ")
    assert loaded == "[]"


@long
@exhaustive
def test_it_loads_beside_klfast_and_other_versions_of_itself(kernel, tmp_path):
    """Each has ops of its own, and the same sources give the same bits."""
    files = sources.package_files()
    files[PurePosixPath("version.py")] += b'__version__ = "0.0.9"\n'
    for path, content in variants.variant_files(files, "cpu").items():
        (tmp_path / "older" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "older" / path).write_bytes(content)
    shutil.copytree(kernel / "build" / "torch-cpu", tmp_path / "copy")
    folders = (kernel, tmp_path / "older", tmp_path / "copy")
    script = hub_kernel.ROOT / "tests" / "support" / "hub_beside.py"
    assert hub_kernel.run(kernel, "-W", "ignore", script, *folders, **INTERPRETED) == "73 73"


@exhaustive
def test_older_versions_of_kernels_find_it(kernel):
    """They import a folder with the kernel's name under a name of their own."""
    code = """
import hub_alone, importlib.util, sys
spec = importlib.util.spec_from_file_location("klfast_1234", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
import torch
value = module.kl_penalty(torch.zeros(1, 1), torch.ones(1, 1), estimator="k1")
print(value.item(), module.__all__[0])
    """
    place = kernel / "build" / "torch-cpu" / "klfast" / "__init__.py"
    assert hub_kernel.run(kernel, "-W", "ignore", "-c", code, place) == "-1.0 AdaptiveKLController"


@exhaustive
def test_a_torch_that_is_too_old_is_named(kernel):
    code = """
import pathlib, sys
import kernels, torch
torch.__version__ = "2.9.1+cu128"
try:
    kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
except ImportError as error:
    print(error)
    """
    output = hub_kernel.run(kernel, "-c", code, kernel)
    assert output.splitlines()[0] == "klfast needs torch 2.10 or later, got 2.9.1+cu128"


@exhaustive
def test_the_example(kernel):
    value, gradient, stats = hub_kernel.run(kernel, "-W", "ignore", "example.py").splitlines()
    assert value == "KL 0.027121 nats per token"
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", gradient)]
    assert numbers == pytest.approx([0.04, -0.02, -0.02, 0, 0.1, 0])  # x of 5 tokens, divided by 5
    assert stats.startswith("KLStats(sequences=2, ")


def test_the_example_of_the_docs(kernel):
    given = f"from pathlib import Path; folder = Path({str(kernel)!r})\n"
    shown = "print(loss.item(), *stats.length.tolist(), *logprobs.grad[0].tolist())"
    code = given + readme.code("hub") + shown
    loss, *others = map(float, hub_kernel.run(kernel, "-W", "ignore", "-c", code).split())
    k3 = [math.expm1(-x) + x for x in (0.2, -0.1, -0.1)]
    assert loss == pytest.approx(sum(k3) / 3, rel=1e-6)
    assert others == pytest.approx([3, 0.2 / 3, -0.1 / 3, -0.1 / 3], rel=1e-6)


@exhaustive
def test_the_benchmarks_agree_with_eager(kernel):
    """``kernels benchmark`` runs them like this, and raises if results differ."""
    code = """
import pathlib, sys
from kernels.cli.benchmark import discover_benchmark_classes, run_benchmark_class
folder = pathlib.Path(sys.argv[1])
for cls in discover_benchmark_classes(folder / "benchmarks" / "benchmark.py", folder):
    results, _ = run_benchmark_class(cls, 1, 0, str(folder), True, "local")
    print(*(f"{cls.__name__}.{name} {timing.verified}" for name, timing in results.items()))
    """
    assert hub_kernel.run(kernel, "-W", "ignore", "-c", code, kernel).split() == [
        *("KLDivergence.gradient", "True"),
        *("KLPenalty.gradient", "True", "KLPenalty.sums", "True"),
    ]


@long
@exhaustive
def test_its_own_tests_pass_in_the_interpreter(kernel):
    output = hub_kernel.run(kernel, *OWN, "-p", "triton_interpreter", **INTERPRETED)
    assert re.match(r"[1-9]\d* passed(, \d+ warnings?)?$", passed(output))
