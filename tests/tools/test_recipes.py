"""The recipes of DESIGN.md, walked: a made-up row of each kind in a copy of the sources.

A recipe whose files have moved, or that lacks a file, fails here. The copy has no extension: of a
row's C++ the formulas and tables are compiled by themselves.
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
PAGE = (ROOT / "DESIGN.md").read_text()


class Edit(NamedTuple):
    """What is written into a file, before the one place in it that a pattern matches."""

    file: str
    before: str
    text: str


class Recipe(NamedTuple):
    """A made-up row, and programs that fail unless it is served."""

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
            "klfast/types/formulas.py",
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
assert oracle.formula("quarter")(3) == 2.25
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

REDUCTION = Recipe(
    (
        Edit(
            "klfast/types/names.py", r"\]\n\"\"\"``reduction=`` of", '    "seq-sum-token-mean",\n'
        ),
        Edit(
            "klfast/types/reduction.py",
            r"\}\n\"\"\"The reduction of every name",
            '    "seq-sum-token-mean": Reduction("scalar", True, "one"),\n',
        ),
        Edit(
            "tests/support/oracle.py",
            r"    \}\[reduction\]",
            '        "seq-sum-token-mean": own,\n',
        ),
    ),
    """
import oracle
mask = torch.tensor([[True, False, True], [True, False, False]])
x = torch.cat([x, -x]).detach().requires_grad_()
for backend in BACKENDS:
    base, k1 = torch.full_like(x, -4.0), klfast.Estimator("k1")
    options = {"estimator": k1, "reduction": "seq-sum-token-mean"}
    loss = klfast.kl_penalty(base + x, base, mask, **options, backend=backend)
    truth = oracle.kl_penalty(base + x.detach(), base, mask, **options)
    torch.testing.assert_close(loss, truth.result)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], truth.grad)
    torch.testing.assert_close(loss.detach(), torch.tensor(1.75 - 0.5, dtype=torch.double))
""",
)

STATISTIC = Recipe(
    (
        Edit("klfast/stats/kl.py", r"\n    def token_mean", "    k1_squares: Tensor\n"),
        Edit(
            "klfast/stats/kl.py",
            r"\}\n\"\"\"The names of ``as_dict``",
            '    "k1_squares": ("k1_squares", "per token"),\n',
        ),
        Edit(
            "klfast/backends/reference/penalty.py",
            r"(?<=\(tokens\.dtype\)\.isfinite\(\)\)\),\n)    \)",
            "        k1_squares=total(weight * x.square()),\n",
        ),
        Edit(
            "csrc/formulas/statistics.h",
            "#undef KLFAST_TERM",
            "struct k1_squares : Statistic<Sum, Depth::kWanted> {\n"
            "  KLFAST_TERM { return token.weight * token.log_ratio * token.log_ratio; }\n};\n",
        ),
        Edit("csrc/formulas/statistics.h", r"(?<=nonfinite)>;", ", k1_squares"),
        Edit(
            "klfast/backends/triton/statistics.py",
            r"\}\n\"\"\"By field of ``KLStats``",
            '    "k1_squares": "sum",\n',
        ),
        Edit(
            "klfast/backends/triton/statistics.py",
            r"(?<= >= infinity\)\.to\(tl\.int32\),\n)        \)",
            "            weight * x * x,\n",
        ),
    ),
    """
for backend in BACKENDS:
    _, stats = klfast.kl_penalty(
        base + x, base, reduction="token-mean", return_stats=True, backend=backend
    )
    torch.testing.assert_close(stats.k1_squares, x.detach().square().sum(1))
    logged = (stats + stats).as_dict()
    torch.testing.assert_close(logged["kl/k1_squares"], x.detach().square().mean())
    assert "k1_squares" in repr(stats)
    assert list(stats.to_floats()) == list(logged)
""",
    """
#include "formulas/statistics.h"
int main() { return klfast::kStatistics == 9 ? 0 : 1; }
""",
)

OF_A_RULE = Recipe(
    (
        Edit("klfast/args/rejection.py", r"\)\n\"\"\"Names of the statistics", '    "gap",\n'),
        Edit(
            "klfast/types/rollout_formulas.py",
            r"\}\n\"\"\"f\(logprobs, rollout_logprobs\) by name",
            '    "gap": lambda a, b: (a - b).square(),\n',
        ),
        Edit(
            "csrc/formulas/rollout.h",
            "#undef KLFAST_STATISTIC",
            "struct of_gap {\n  KLFAST_STATISTIC { return token.x * token.x; }\n};\n",
        ),
        Edit("csrc/formulas/rollout.h", r"(?<=of_binary_tv)>;", ", of_gap"),
    ),
    """
rule = klfast.Rejection("gap", "token", high=1.0)
mask = klfast.rollout_correction(base + x.detach(), base, reject=(rule,)).mask
assert mask.tolist() == [[True, False, False]]
""",
    """
#include "formulas/rollout.h"
int main() { return klfast::rollout::RuleTable::kSize == 8 ? 0 : 1; }
""",
)

OF_THE_SAMPLER = Recipe(
    (
        Edit(
            "klfast/stats/rollout.py",
            r"    rules: tuple\[RuleStats, \.\.\.\] = \(\)\n",
            "    cubes: Tensor\n",
        ),
        Edit(
            "klfast/types/rollout_formulas.py",
            r"\}\n\"\"\"By the field's name",
            '    "cubes": Sum(lambda token: token.x**3, mean="cube"),\n',
        ),
        Edit(
            "csrc/rollout/statistics.h",
            r"// In the order of RolloutStats",
            """
struct cubes : Sum {
  template <typename T>
  static KLFAST_HOST_DEVICE T far(const FarToken<T>& token) {
    return token.x * token.x * token.x;
  }
};
""",
        ),
        Edit("csrc/rollout/statistics.h", r"(?<=outside)>;", ", cubes"),
    ),
    """
stats = klfast.rollout_correction(base + x.detach(), base).stats
torch.testing.assert_close(stats.cubes, (x.detach() ** 3).sum(1))
torch.testing.assert_close(stats.as_dict()["rollout/cube"], (x.detach() ** 3).mean())
""",
    """
#include "rollout/statistics.h"
int main() { return klfast::rollout::kRolloutStatistics == 24 ? 0 : 1; }
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
            "klfast/__init__.py",
            r"    TargetController,\n    get_kl",
            "    SwitchKLController,\n",
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

FRAMEWORK = Recipe(
    (
        Edit(
            "klfast/compat/frameworks.py",
            r"\}\n\"\"\"By the name of its module",
            '    "made_up": Framework("Made up", "made_up", "1.0, main"),\n',
        ),
        Edit("klfast/compat/made_up.py", "", "from klfast.compat.presets import MADE_UP\n"),
        Edit("klfast/compat/targets.py", r'    "trlx": \(_TRLX', '    "made_up": ((),),\n'),
        Edit("klfast/compat/presets.py", r"SKYRL = \{", 'MADE_UP = Estimator("k1")\n\n'),
        Edit("klfast/compat/__init__.py", r"        ms_swift,\n", "        made_up,\n"),
        Edit("klfast/compat/__init__.py", r"    \"ms_swift\",\n", '    "made_up",\n'),
    ),
    """
assert klfast.compat.made_up.MADE_UP == klfast.Estimator("k1")
try:
    klfast.compat.patch("made_up")
except klfast.compat.PatchError as error:
    assert str(error) == "made_up is not installed"
""",
)

BACKEND = Recipe(
    (
        Edit("klfast/types/names.py", r"\]\n\"\"\"``backend=`` of every function", ', "mirror"'),
        Edit(
            "klfast/backends/order.py",
            r"ORDER = ",
            'MIRROR = REFERENCE._replace(name="mirror")\n',
        ),
        Edit("klfast/backends/order.py", r"(?<=REFERENCE)\)\n\"\"\"", ", MIRROR"),
    ),
    """
assert klfast.kl_penalty(base + x, base, backend="mirror").equal(
    klfast.kl_penalty(base + x, base, backend="reference")
)
assert "mirror" in klfast.backends.BACKENDS
""",
)

RECIPES = {
    "An estimator": ESTIMATOR,
    "A reduction": REDUCTION,
    "A statistic": STATISTIC,
    "A statistic of a rule": OF_A_RULE,
    "A statistic of the sampler": OF_THE_SAMPLER,
    "A controller": CONTROLLER,
    "A framework": FRAMEWORK,
    "A backend": BACKEND,
}


def text_of(title):
    """The recipe's text in DESIGN.md, up to the next."""
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
