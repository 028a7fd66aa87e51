"""Importing klfast costs torch and nothing more, and no module imports in a circle."""

import ast
import functools
import graphlib
import json
from pathlib import Path

from fresh import run_fresh

ROOT = Path(__file__).parents[2]
PACKAGES = ("klfast", "lab", "benchmarks")

HEAVY = ["triton", "numpy", "matplotlib", "rich", "jinja2"]

FRESH = f"""
import json, sys
for name in {HEAVY}:
    sys.modules[name] = None  # from here on, importing it raises
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own
import torch
before = set(sys.modules)
import klfast
added = sorted(set(sys.modules) - before)
logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
penalty, stats = klfast.kl_penalty(
    logprobs, torch.tensor([[-1.5, -2.0]]), reduction="token-sum", estimator="k1+",
    return_stats=True,
)
penalty.backward()
controller = klfast.AdaptiveKLController(0.1, 6.0)
controller.update(stats)
logits = torch.zeros(1, 2, requires_grad=True)
found = klfast.kl_divergence(
    logits, torch.tensor([[0.0, 30.0]]), direction="jsd", token_ids=torch.tensor([0])
)
entropy = klfast.token_logprobs(logits, torch.tensor([0]), return_entropy=True).entropy
results = found.kl, found.logprobs, entropy
sum(results).sum().backward()
numbers = penalty.item(), controller.value < 0.1, *(each.item() for each in results)
print(json.dumps([added, [round(n, 4) for n in (*numbers, logits.grad.sum().item())]]))
"""


def test_importing_warns_of_nothing_and_needs_nothing_but_torch():
    """It loads no program over the library, and no drop-in for a framework."""
    added, numbers = json.loads(run_fresh(FRESH, "-W", "error"))
    assert "klfast.functional.penalty" in added
    assert not {name for name in added if name.split(".")[0] in ("lab", "benchmarks", *HEAVY)}
    assert not {name for name in added if name.startswith(("klfast.compat", "torch._dynamo"))}
    assert numbers == [0.5, 1, 0.2158, -0.6931, 0.6931, 0]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def modules():
    """Dotted name -> file."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return {n.removesuffix(".__init__"): path for n, path in zip(names, files, strict=True)}


def imported(path):
    """The names that a module imports for itself or its types, not in its functions."""
    nodes = [*tree_of(path).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if {*names} <= modules().keys() else (node.module, *names)
        elif isinstance(node, ast.If | ast.Try):
            nodes += ast.iter_child_nodes(node)


def test_the_library_imports_no_program_over_it():
    for name, path in modules().items():
        above = {"klfast": {"lab", "benchmarks"}, "benchmarks": {"lab"}, "lab": set()}
        tops = {other.partition(".")[0] for other in every_import(path)}
        assert not tops & above[name.partition(".")[0]], name


@functools.cache
def every_import(path):
    """The modules that a file names in any import."""
    nodes = [*ast.walk(tree_of(path))]
    named = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    return named + [node.module for node in nodes if isinstance(node, ast.ImportFrom)]


LAYERS = (
    *("types", "formulas", "distributed", "args", "stats", "ops", "controllers"),
    *("autograd", "backends", "functional", "training", "compat", "cli"),
)
"""The packages of klfast. Each imports only packages before it."""


def test_no_package_imports_one_above_it():
    assert {path.parent.name for path in (ROOT / "klfast").glob("*/__init__.py")} == {*LAYERS}
    for name, path in modules().items():
        packages = [other.split(".")[1] for other in every_import(path) if "klfast." in f"{other}"]
        if name.startswith("klfast.") and (own := name.split(".")[1]) in LAYERS:
            above = LAYERS[LAYERS.index(own) + 1 :]
            assert not {*packages} & {*above}, name


def test_no_module_imports_in_a_circle():
    """Imports under ``if TYPE_CHECKING`` count. A module of a package is not the package."""
    files = modules()
    graph = {name: {*imported(path)} & files.keys() for name, path in files.items()}
    assert graph["klfast.autograd.penalty"] >= {"klfast.args.penalty", "klfast.ops.schemas"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


CARRIERS = ("types", "args", "stats")
COMPUTES = {"sum", "cumsum", "logsumexp", "matmul", "mm", "backward", "apply"}
TALKS = {"all_reduce", "all_gather", "gather", "add_up", "tell", "side_by_side"}
OF_STATS = ("token_mean", "sequence_mean", "as_dict", "all_reduce", "weight_mean")
"""What the tuples of statistics compute from themselves if they are asked."""


def test_what_carries_a_call_neither_computes_nor_communicates():
    """Arguments, statistics and types have no Function, no sum over a tensor and no collective."""
    for name, path in modules().items():
        if not name.startswith(tuple(f"klfast.{package}." for package in CARRIERS)):
            continue
        tree = tree_of(path)
        asked = {
            node
            for of in ast.walk(tree)
            if isinstance(of, ast.FunctionDef)
            and (name.startswith("klfast.stats."))
            and (of.name in OF_STATS or of.name.startswith("_"))
            for node in ast.walk(of)
        }
        bases = [
            ast.unparse(b) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for b in c.bases
        ]
        called = {
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node not in asked
        }
        assert not {base for base in bases if base.endswith("autograd.Function")}, name
        assert not called & (COMPUTES | TALKS), name
