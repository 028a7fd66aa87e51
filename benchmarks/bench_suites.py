"""The suites' cases through pytest-benchmark: klfast's backends beside eager and its compilation.

``KLFAST_BENCH_SHAPE=RxC`` sets the shape of all (512x8192): rows x columns, for what a call costs
4x64. At toy size, without timing::

    KLFAST_BENCH_SHAPE=4x64 pytest benchmarks --benchmark-disable -k "not compile"

For ratios use ``python -m benchmarks``: here every candidate has its own stretch of time.
"""

import itertools
import os

import pytest
import torch

from benchmarks.candidates import candidate, compiled_forward
from benchmarks.cases import DTYPES, EAGER, Case, make_inputs
from benchmarks.measure import check_candidates
from benchmarks.suites import OPS, SUITES
from klfast import backends

SHAPE = tuple(map(int, os.environ.get("KLFAST_BENCH_SHAPE", "512x8192").split("x")))


def shape_of(op):
    """``SHAPE``, with the suite's toy sizes between rows and columns."""
    suite = next(suite for suite in SUITES.values() if op.name in suite.ops)
    rows, columns = SHAPE
    return (rows, *suite.quick_shapes[0][1:-1], columns)


def forward_of(op, impl):
    if impl == "compile":
        return compiled_forward(op)
    if impl == EAGER:
        return op.eager()[EAGER]
    reason = backends.BACKENDS[impl].why_not(torch.device("cpu"))
    if reason is not None:
        pytest.skip(f"backend {impl}: {reason}")
    return op.klfast(impl)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", [*backends.BACKENDS, EAGER, "compile"])
def test_op(benchmark, impl, op, dtype):
    benchmark.group = f"{op.name}, {dtype}, {list(shape_of(op))}"
    call, inputs = (
        candidate(op, forward_of(op, impl)),
        make_inputs(Case(op, dtype, shape_of(op)), 4),
    )
    assert check_candidates({impl: call}, op, inputs[0])
    sets = itertools.cycle(inputs)
    benchmark(lambda: call(next(sets)))
