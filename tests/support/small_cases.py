"""Small cases of the benchmarks: six rows of 130 token ids or tokens."""

from benchmarks.cases import Case
from benchmarks.linear import LinearOp

WIDTH = 16


def small(op, dtype="fp32"):
    """The case of an op."""
    return Case(op, dtype, (6, WIDTH, 130) if isinstance(op, LinearOp) else (6, 130))
