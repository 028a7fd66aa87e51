"""Public docstrings have what their page needs: arguments, shapes, units, errors, source."""

import importlib
import inspect
import re

import pytest

import klfast
from klfast.compat import FRAMEWORKS

NAMES = sorted(
    name
    for name in set(klfast.__all__) - {"__version__", "compat", "names", "rollout_presets"}
    if not name.endswith("Name")
)
PUBLIC = {name: getattr(klfast, name) for name in NAMES}
PUBLIC |= {"compat.patch": klfast.compat.patch, "compat.unpatch": klfast.compat.unpatch}

TUPLES = {name for name, value in PUBLIC.items() if hasattr(value, "_fields")}
"""Results of functions. Only klfast makes them, so they document no errors."""
PROTOCOLS = {"KLController"}  # protocols that users implement
OVER_TENSORS = [name for name in NAMES if "mask" in inspect.signature(PUBLIC[name]).parameters]
OVER_TENSORS = [name for name in OVER_TENSORS if name not in TUPLES]
WITHOUT_UNITS = {"info", "compat.patch", "compat.unpatch", "data_parallel_normalizer"}
WITHOUT_UNITS |= {"RolloutCorrection"}  # names whose results have no unit of a KL
WITHOUT_ARITHMETIC = {"data_parallel_normalizer"}
"""A count, which does not depend on the log-probs' dtype."""
OWN = {
    "FixedKLController",
    "GroupedKLController",
    "KLLog",
    "KLMonitor",
    "KLPenalty",
    "TargetController",
    "compat.patch",
    "compat.unpatch",
    "data_parallel_normalizer",
    "get_kl_controller",
    "info",
    "log_ratio_profile",
    "worst_tokens",
    "token_logprobs",
    *TUPLES,
}
"""Names without a publication: textbook formulas, or klfast's own bookkeeping."""


def section(doc, title):
    """The indented lines under a title of a docstring."""
    found = re.search(rf"^{title}:\n((?:[ \t]+.*\n|\n)*)", doc + "\n", re.MULTILINE)
    return found[1] if found else ""


def entries(doc, title):
    """The names that a section explains. "high, low:" explains two."""
    heads = re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", section(doc, title), re.MULTILINE)
    return {name.strip(" *") for head in heads for name in head.split(",")}


def parameters(value):
    return set(inspect.signature(value).parameters) - {"self", "cls"}


def docs_of(name):
    """The docstring of a name. A controller with a target adds its base class's docstring."""
    value = PUBLIC[name]
    is_steering = inspect.isclass(value) and issubclass(value, klfast.TargetController)
    return [inspect.getdoc(each) for each in ((value, klfast.TargetController)[: 1 + is_steering])]


def methods():
    """Methods and properties that klfast's classes have of their own."""
    for name, value in PUBLIC.items():
        for attribute, member in inspect.getmembers(value) if inspect.isclass(value) else ():
            function = member.fget if isinstance(member, property) else member
            module = getattr(function, "__module__", None) or ""
            if not attribute.startswith("_") and module.startswith("klfast"):
                yield pytest.param(function, id=f"{name}.{attribute}")


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - PROTOCOLS))
def test_every_argument_is_explained(name):
    title = "Attributes" if name in TUPLES else "Args"
    explained = set().union(*(entries(doc, title) for doc in docs_of(name)))
    if len(docs_of(name)) > 1:
        explained -= {"options"}  # each option has its own entry
    assert explained == parameters(PUBLIC[name])


@pytest.mark.parametrize("method", [*methods()])
def test_a_method_says_what_it_does_and_names_its_arguments(method):
    doc = inspect.getdoc(method)
    assert doc
    named = entries(doc, "Args") | set(re.findall(r"``(\w+)(?:=[^`]*)?``", doc))
    assert isinstance(method, property) or parameters(method) <= named


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if name not in TUPLES | PROTOCOLS | {"info"}]
)
def test_errors_are_named_with_their_causes(name):
    """``info`` also works where klfast does not, and raises nothing."""
    errors = "".join(section(doc, "Raises") for doc in docs_of(name))
    assert re.search(r"^ {4}\w+Error(, \w+Error)*: .", errors, re.MULTILINE)


@pytest.mark.parametrize("name", PUBLIC)
def test_results_and_units_are_given(name):
    doc = "".join(docs_of(name))
    assert inspect.isclass(PUBLIC[name]) or section(doc, "Returns").strip()
    assert name in WITHOUT_UNITS or re.search(r"\bnats?\b", doc)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in OWN])
def test_the_source_is_named(name):
    """The source has a year, is klfast's own, or is another public name."""
    doc = inspect.getdoc(PUBLIC[name])
    source = doc[re.search(r"^Sources?\b", doc, re.MULTILINE).start() :]
    assert re.search(r"\b(19|20)\d\d\b|klfast's own|:class:`klfast\.", source)


@pytest.mark.parametrize("name", OVER_TENSORS)
def test_shapes_and_dtypes_are_given(name):
    doc = inspect.getdoc(PUBLIC[name])
    assert re.search(r"\[B, T\]|\[\.\.\.(, V)?\]", doc)
    assert re.search(r"\[N[],]|\[\.\.\.", doc)
    assert name in WITHOUT_ARITHMETIC or re.search(r"fp32.*\(?fp64", doc, re.DOTALL)


COMPAT = {
    f"{framework}.{name}": getattr(module, name)
    for framework in FRAMEWORKS
    for module in [importlib.import_module(f"klfast.compat.{framework}")]
    for name in sorted({*module.__all__} & {*vars(module)})  # without what needs the framework
    if inspect.isfunction(getattr(module, name)) and name != "setup_worker"  # a hook
}
WITHOUT_KL = {"verl.agg_loss", "trlx.get_kl_controller"}
"""A sum of any loss, and a factory whose class gives the units."""
OF_RATIOS = {
    "verl.compute_rollout_correction_weights",
    "verl.compute_rollout_correction_and_rejection_mask",
    "verl.compute_rollout_correction_and_add_to_batch",
}
"""Weights, which have no unit."""


@pytest.mark.parametrize("name", COMPAT)
def test_a_frameworks_function_gives_its_unit_and_shape(name):
    doc = inspect.getdoc(COMPAT[name])
    assert name in WITHOUT_KL | OF_RATIOS or re.search(r"\bnats?\b", doc)
    assert name.endswith(".get_kl_controller") or re.search(r"\[[\w., -]+\]|shape of|0-dim", doc)
