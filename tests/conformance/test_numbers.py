"""Values and gradients of every public function on every backend, by the engine of klfast check.

The reference in float64 is the truth. The tests of the oracle hold the reference to its formulas.
"""

import hypothesis
import pytest
import torch
from families import FAMILIES, cases_of, served
from hypothesis import strategies
from targets import OF_ROLLOUT, TARGETS, serving

from klfast.cli.check.compare import found_by, truth_of, wrong_of
from klfast.cli.check.promises import promises

every_target = pytest.mark.parametrize("target", TARGETS)
every_family = pytest.mark.parametrize("family", FAMILIES)


def wrong_on(target, call, truth):
    """The results of a target that are further from the truth than allowed."""
    backend, device, _ = TARGETS[target]
    return wrong_of(truth, found_by(call, backend, torch.device(device)))


@pytest.mark.long
@every_target
@every_family
def test_any_two_options(target, family):
    """Layouts, masks over NaN, dtypes, reductions, options and leaves: any two meet in a case."""
    cases = cases_of(family)
    with served(target, family):
        wrong = {case.name: wrong_on(target, call, truth) for case, call, truth in cases}
    assert not {name: faults for name, faults in wrong.items() if faults}


@every_family
@hypothesis.given(data=strategies.data())
def test_any_options(family, data):
    """Options by chance, and other numbers."""
    of = FAMILIES[family]
    row = {name: data.draw(strategies.sampled_from(v)) for name, v in of.options.items()}
    call = of.call(row, data.draw(strategies.integers(0, 2**31)))
    truth = truth_of(call)
    for name in OF_ROLLOUT if family == "rollout" else TARGETS:
        with serving(TARGETS[name]):
            assert not wrong_on(name, call, truth), name


@pytest.mark.long
@every_target
@every_family
def test_bits_and_signs(target, family):
    """A sequence has the same bits in any company, and no estimate is negative near 0."""
    with served(target, family):
        backend = TARGETS[target].backend
        kept = promises(backend, torch.device(TARGETS[target].device))
        wrong = {name: broken() for of, name, broken in kept if of == family}
    assert not {name: faults for name, faults in wrong.items() if faults}
