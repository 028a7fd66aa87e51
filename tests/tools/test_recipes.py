"""Two recipes of CONTRIBUTING.md: a copy of the sources gets a made-up row of each kind.

A recipe fails here if its files have moved or it lacks a file. The copy has no extension. A row's
C++ formulas and tables are compiled by themselves.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
from readme import ROOT

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


class Edit(NamedTuple):
    """A text for a file, and the pattern of the one place in front of which it goes."""

    file: str
    before: str
    text: str


class Recipe(NamedTuple):
    """A made-up row, and programs that fail without it."""

    edits: tuple[Edit, ...]
    python: str
    cpp: str = ""


INPUTS = """
import torch, klfast
x = torch.tensor([[0.5, -2.0, 3.0]], dtype=torch.double, requires_grad=True)
base = torch.full_like(x, -4.0)
BACKENDS = ["reference", "triton"]
"""

ESTIMATOR = Recipe(
    (
        Edit("klfast/types/names.py", r"\]\n\"\"\"Estimators that have a formula", ', "quarter"'),
        Edit(
            "klfast/formulas/estimators.py",
            r"\}\n\"\"\"f\(x\) of every name",
            '    "quarter": lambda x: x.square() / 4,\n',
        ),
        Edit(
            "csrc/formulas/estimators.h",
            "#undef KLFAST_FORMULA",
            'struct quarter {\n  static constexpr const char* name = "quarter";\n'
            "  KLFAST_FORMULA { return {x * x / T(4), x / T(2), x * x / T(4) + x / T(2)}; }\n};\n",
        ),
        Edit("csrc/formulas/estimators.h", r"(?<=r_log_r)>;", ", quarter"),
        Edit(
            "klfast/backends/triton/math.py",
            r"class Formula\(",
            "@triton.jit\ndef quarter_value(x):\n    return x * x / 4\n\n"
            "@triton.jit\ndef quarter_derivative(x):\n    return x / 2\n\n"
            "@triton.jit\ndef quarter_sum(x):\n    return x * x / 4 + x / 2\n\n",
        ),
        Edit(
            "klfast/backends/triton/math.py",
            r"\}\n\"\"\"Names of ``klfast.types.names.ESTIMATORS``",
            '    "quarter": Formula(quarter_value, quarter_derivative, quarter_sum),\n',
        ),
        Edit(
            "tests/support/oracle.py",
            r"\}\n\"\"\"f\(x\) of the estimators",
            '    "quarter": lambda x: x**2 / 4,\n',
        ),
    ),
    """
for backend in BACKENDS:
    kl = klfast.kl_penalty(base + x, base, estimator="quarter", backend=backend)
    torch.testing.assert_close(kl, x * x / 4)
    torch.testing.assert_close(torch.autograd.grad(kl.sum(), x)[0], x / 2)
    weighted = klfast.kl_penalty(
        base + x, base, estimator=klfast.Estimator("quarter", importance="differentiable"),
        old_logprobs=base + x.detach(), backend=backend,
    )
    torch.testing.assert_close(
        torch.autograd.grad(weighted.sum(), x)[0], (x * x / 4 + x / 2).detach()
    )
import oracle
assert oracle.CONTRACT["quarter"](3) == 2.25
""",
    """
#include "formulas/estimators.h"
using namespace klfast;
int main() {
  double sum = 0;
  visit_row(estimators::EstimatorTable(), 6, [&](auto row) {
    auto at = decltype(row)::template at<math::Range::kAnywhere>(3.0);
    sum = at.value + at.derivative + at.value_plus_derivative;
  });
  return sum == 2.25 + 1.5 + 3.75 ? 0 : 1;
}
""",
)


CONTROLLER = Recipe(
    (
        Edit(
            "klfast/controllers/rules.py",
            r"def doubling\(",
            "def switch(settings, state, batch):\n"
            "    is_high, value = batch.kl > batch.target, state['value']\n"
            "    value = where(is_high, value * 2, value / 2)\n"
            "    return {**state, 'value': value}\n\n\n",
        ),
        Edit(
            "klfast/controllers/target.py",
            r"class DoublingKLController\(",
            "class SwitchKLController(TargetController):\n"
            "    _kind, _rule, _paced_by = 'switch', staticmethod(rules.switch), 'target'\n\n"
            "    @shows_options\n"
            "    def __init__(self, init_kl_coef, target, **options):\n"
            "        super().__init__(init_kl_coef, target, **options)\n\n\n",
        ),
        Edit(
            "klfast/__init__.py", r"    TargetController,\n    get_kl", "    SwitchKLController,\n"
        ),
    ),
    """
for device in (None, "cpu"):
    controller = klfast.SwitchKLController(0.25, 6.0, device=device)
    controller.update(9.0)
    assert float(controller.value) == 0.5
    again = klfast.SwitchKLController(1.0, 6.0)
    again.load_state_dict(controller.state_dict())
    assert again.update(1.0) == 0.25
from types import SimpleNamespace
from klfast.compat import verl
config = SimpleNamespace(type="switch", kl_coef=0.25, target_kl=0.1, horizon=1)
assert verl.get_kl_controller(config).update(current_kl=0.2, n_steps=4.0) == 0.5
import kinds
assert kinds.make("switch", 0.25, 6.0).update(9.0) == 0.5
""",
)


RECIPES = {"An estimator": ESTIMATOR, "A controller": CONTROLLER}


def text_of(title):
    """The recipe's text in CONTRIBUTING.md, up to the next recipe."""
    found = re.search(rf"\*\*{title}(?:\.\*\*|\*\*)(.*?)(?=\*\*An? |\n## )", PAGE, re.DOTALL)
    return found[1]


def insert(folder, edit):
    path = folder / edit.file
    if not edit.before:
        path.write_text(edit.text)
        return
    text = path.read_text()
    places = [*re.finditer(edit.before, text)]
    assert len(places) == 1, f"{edit.file} has {edit.before!r} {len(places)} times"
    at = places[0].start()
    path.write_text(text[:at] + edit.text + text[at:])


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_names_the_files_it_takes(title):
    text = text_of(title)
    for file in {edit.file for edit in RECIPES[title].edits}:
        folder = file.rpartition("/")[0]
        names = (file, file.removeprefix("klfast/backends/"), f"{folder}/<name>.py", f"{folder}/`")
        names = (*names, file.removeprefix("klfast/compat/"))
        assert any(f"`{name.strip('`')}" in text for name in names), file


@pytest.mark.exhaustive
@pytest.mark.parametrize("title", RECIPES)
def test_a_row_that_keeps_to_the_recipe_is_served(title, tmp_path):
    recipe = RECIPES[title]
    ignore = shutil.ignore_patterns("__pycache__", "_C*.so")
    for folder in ("klfast", "csrc", "tests/support"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    for edit in recipe.edits:
        insert(tmp_path, edit)
    paths = [str(tmp_path), str(tmp_path / "tests/support")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INPUTS + recipe.python],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    if recipe.cpp and shutil.which(COMPILER[0]):
        (tmp_path / "row.cpp").write_text(recipe.cpp)
        flags = ["-std=c++17", "-Wall", "-Werror", "-Icsrc", "row.cpp", "-o", "row"]
        subprocess.run([*COMPILER, *flags], check=True, cwd=tmp_path)
        subprocess.run([str(tmp_path / "row")], check=True)
