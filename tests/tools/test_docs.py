"""The site's pages name all public names, and the public names are the promised ones."""

import inspect
import re
import typing
from pathlib import Path

import pytest
import readme

import klfast

API = Path(__file__).with_name("public_api.txt")
WITHOUT_FORMULA = {
    *("FixedKLController", "GroupedKLController", "KLController", "TargetController"),
    "get_kl_controller",
    *("KLDriftAlarm", "ReferenceReset", "KLLog", "info"),
    *("KLStats", "LogRatioProfile", "RolloutCorrection", "RolloutStats", "RuleStats"),
    *("KLDivergence", "TokenLogprobs", "TokenLoss", "WorstToken"),
}
"""Bookkeeping, controllers that are explained in words, and results."""
REFERENCE = readme.ROOT / "docs" / "api" / "index.rst"


def signature_of(name):
    """Parameters and defaults, or the values of a literal. A type checker reads annotations."""
    value = getattr(klfast, name)
    if choices := typing.get_args(value):
        return f"{name}[{', '.join(choices)}]"
    signature = inspect.signature(value)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=plain, return_annotation=signature.empty)}"


def public_names():
    return sorted(set(klfast.__all__) - {"__version__", "compat", "names", "rollout_presets"})


def test_names_and_signatures_are_those_that_were_promised():
    """docs/stability.md says what may change. `python tests/tools/test_docs.py` writes the list."""
    assert API.read_text().splitlines() == [signature_of(name) for name in public_names()]


@pytest.mark.parametrize("name", [name for name in public_names() if not name.endswith("Name")])
def test_every_public_name_has_a_page(name):
    assert re.search(rf"^   {name}$", REFERENCE.read_text(), re.MULTILINE)


def test_llms_txt_lists_every_page():
    """`make docs` follows its links. Functions and frameworks have their own indices."""
    text = (readme.ROOT / "docs" / "llms.txt").read_text()
    docs = readme.ROOT / "docs"
    pages = {path.stem for path in docs.glob("*.md")} - {"index"}
    pages |= {f"notebooks/{path.stem}" for path in docs.glob("notebooks/*.ipynb")}
    listed = re.findall(r"^- \[[^]]+\]\(([\w/]+)\.html\)", text, re.MULTILINE)
    assert sorted(listed) == sorted({*pages, "api/index"})


def test_every_page_that_computes_has_a_formula():
    formulas = {}
    exec((readme.ROOT / "docs" / "formulas.py").read_text(), formulas)
    pages = {name for name in public_names() if not name.endswith("Name")}
    assert set(formulas["FORMULAS"]) <= set(klfast.__all__)
    assert pages - set(formulas["FORMULAS"]) == WITHOUT_FORMULA


if __name__ == "__main__":
    API.write_text("".join(signature_of(name) + "\n" for name in public_names()))
