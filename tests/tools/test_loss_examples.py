"""Examples agree with the README's table: their losses have the gradient of a KL."""

import ast

import pytest
import readme

from klfast.types.names import PLUS
from klfast.types.reduction import REDUCTIONS

IN_A_LOSS = {*PLUS, "k2", "mse"}
"""The estimators whose gradient is the reverse KL's, on tokens of the policy itself."""
MEASURED = {"ppo.py": {"k3"}, "tutorial-1": {"k3"}, "tutorial-2": {"k3"}}
"""Estimators that an example only measures: PPO's early stop, a first number."""


def keyword(call, name):
    """The value of a keyword that is a constant, or None."""
    values = [k.value for k in call.keywords if k.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def losses(code):
    """The estimators of kl_penalty and KLPenalty in a code, if the result is a scalar."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        if name == "KLPenalty":
            first = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield (first or [keyword(node, "estimator") or "k3+"])[0]
        given = {k.arg: k.value for k in node.keywords}
        if name == "kl_penalty" and not {None, "old_logprobs"} & given.keys():
            is_named = isinstance(given.get("estimator", ast.Constant("k3")), ast.Constant)
            if is_named and REDUCTIONS[keyword(node, "reduction") or "none"].is_scalar():
                yield keyword(node, "estimator") or "k3"


BLOCKS = [b for b in readme.blocks() if b.language == "python"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_loss_has_the_gradient_of_a_kl(block):
    assert set(losses(block.code)) <= IN_A_LOSS | MEASURED.get(block.name, set())


@pytest.mark.parametrize("path", sorted(readme.ROOT.glob("examples/*.py")), ids=lambda p: p.name)
def test_a_program_s_loss_has_the_gradient_of_a_kl(path):
    assert set(losses(path.read_text())) <= IN_A_LOSS | MEASURED.get(path.name, set())
