"""Small cases of the benchmarks: six rows of 130 token ids or tokens."""

from benchmarks.cases import Case
from benchmarks.linear import LinearOp
from benchmarks.step import StepOp

WIDTH = 16


def small(op, dtype="fp32"):
    """The case of an op."""
    if isinstance(op, StepOp):
        return Case(op, dtype, (2, 3, WIDTH, 130))
    return Case(op, dtype, (6, WIDTH, 130) if isinstance(op, LinearOp) else (6, 130))
