"""Divergences and log-probs over a vocabulary, klfast's backends beside eager and its compilation.

``KLFAST_BENCH_SHAPE`` is tokens x words here.
"""

import itertools

import pytest

from benchmarks.candidates import candidate, compiled_forward
from benchmarks.cases import DTYPES, EAGER, Case, make_inputs
from benchmarks.logits import OPS
from benchmarks.measure import check_candidates


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_op(benchmark, impl, shape, op, dtype):
    benchmark.group = f"{op.name}, {dtype}, {list(shape)}"
    if impl == "compile":
        forward = compiled_forward(op)
    else:
        forward = op.eager()[EAGER] if impl == "eager" else op.klfast(impl)
    call, inputs = candidate(op, forward), make_inputs(Case(op, dtype, shape), 4)
    assert check_candidates({impl: call}, op, inputs[0])
    sets = itertools.cycle(inputs)
    benchmark(lambda: call(next(sets)))
