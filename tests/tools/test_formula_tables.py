"""The tables and drawings of pages have the formulas, names and numbers of klfast.

Divergences are those of the extension.
"""

import re
import runpy

import pytest
import readme
import torch

import klfast
from klfast.args.estimator import Estimator
from klfast.args.logits import LEAST_SKEW
from klfast.compat import presets
from klfast.types.names import NAMES, PLUS
from klfast.types.reduction import REDUCTIONS

PAGE = (readme.ROOT / "docs" / "penalty.md").read_text()
X = torch.tensor([[-3.0, -0.5, 0.0, 0.25, 2.0]], dtype=torch.float64)
CELLS = {
    "\N{MINUS SIGN}": "-",
    "²": "**2",
    "eˣ": "exp(x)",
    "·": "*",
    "\\|x\\|": "abs(x)",
    ", 0 at 0": "",
}
"""A sign of a page -> Python's."""


def rows_of_the_page():
    for line in re.findall(r"^\| `(?:k|abs|r_).*$", PAGE, re.MULTILINE):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        yield re.findall(r"`(\w+)`", cells[0]), cells[1:3]


def rows_of_the_docstring():
    _, _, table = klfast.Estimator.__doc__.partition("what it is\n")
    for line in table.partition(".. [#a]")[0].splitlines()[1:-2]:
        names, *cells = re.split(r"\s{2,}", line.strip())  # columns are two spaces apart
        yield re.findall(r"[a-z]\w+", names), cells[:2]


def computed(text):
    """The value of a cell at the points of X."""
    for sign, python in CELLS.items():
        text = text.replace(sign, python)
    known = {name: getattr(torch, name) for name in ("abs", "exp", "expm1", "sign")}
    return torch.ones_like(X) * eval(text, {"x": X, **known})


ROWS = {"page": [*rows_of_the_page()], "docstring": [*rows_of_the_docstring()]}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_it_has_every_estimator(rows):
    named = {name for names, _ in rows for name in names} | {"low_var_kl"}
    assert named == {*NAMES} - {*PLUS}


@pytest.mark.parametrize(
    ("name", "formulas"),
    [(n, cells) for rows in ROWS.values() for names, cells in rows for n in names],
)
def test_its_formulas_are_those_that_are_computed(name, formulas):
    logprobs = X.clone().requires_grad_()
    value = klfast.kl_penalty(logprobs, torch.zeros_like(X), estimator=name)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    for found, formula in zip((value.detach(), gradient), formulas, strict=True):
        torch.testing.assert_close(found, computed(formula), rtol=1e-12, atol=1e-15)


def test_the_least_skew_is_the_kernels():
    source = (readme.ROOT / "csrc" / "formulas" / "divergences.h").read_text()
    (least,) = re.findall(r"kLeastSkew = (.*);", source)
    assert float(least) == LEAST_SKEW


WORDS = runpy.run_path(str(readme.ROOT / "docs" / "_ext" / "words.py"))


def test_the_page_has_the_table_of_the_code():
    """`python docs/_ext/words.py` prints it."""
    page = (readme.ROOT / "docs" / "glossary.md").read_text()
    assert page.partition("<!-- words -->\n")[2] == WORDS["page"]()


def test_every_preset_is_in_it():
    listed = [words for _, words in WORDS["ESTIMATORS"]]
    own = {name: value for name, value in vars(presets).items() if name.isupper()}
    groups = [value for name, value in own.items() if not name.startswith(("K3_", "_"))]
    for group in groups:
        assert group in listed or group in [each for words in listed for each in words.values()]


def test_an_estimator_is_written_as_python_reads_it():
    for _, words in WORDS["ESTIMATORS"]:
        for estimator in words.values():
            text = WORDS["text_of"](estimator)
            read = eval(text, {"Estimator": Estimator})
            assert (Estimator(read) if isinstance(read, str) else read) == estimator


DRAWING = (readme.ROOT / "docs" / "drawings" / "reductions.svg").read_text()
VALUES = torch.tensor([[1.0, 2.0, 6.0, torch.nan], [4.0, 6.0, torch.nan, torch.nan]])
SHOWN = re.findall(
    r'class="code"[^>]*>([\w-]+)</text>(?:\n<text.*){2}\n<text[^>]*>(.*)</text>', DRAWING
)


def test_it_has_every_reduction():
    assert [name for name, _ in SHOWN] == [*REDUCTIONS]


@pytest.mark.parametrize(("name", "shown"), SHOWN)
def test_its_numbers_are_those_of_both_layouts(name, shown):
    numbers = [float(number) for number in re.findall(r"[\d.]+", shown)]
    padded = klfast.reduce(VALUES, ~VALUES.isnan(), reduction=name)
    edges = torch.tensor([0, 3, 5])
    packed = klfast.reduce(VALUES[~VALUES.isnan()], reduction=name, cu_seqlens=edges)
    assert padded.flatten().tolist() == pytest.approx(numbers)
    assert packed.flatten().tolist() == pytest.approx([n for n in numbers if n or name != "none"])
