"""Comparisons of two trainings, number by number."""

import pytest
import tiny


def assert_same_logs(ours, theirs, rtol=1e-5, atol=2e-6):
    """Every number agrees to a few roundings of fp32. Each optimizer step adds some of its own."""
    assert len(ours) == len(theirs) > 0
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            near = {"rel": rtol * (1 + 2 * step), "abs": atol}
            expected = value if isinstance(value, str) else pytest.approx(value, **near)
            assert mine[name] == expected, (step, name)


def assert_same_training(ours, theirs):
    """Logs, evaluations and trained parameters of two ``tiny.Run`` agree."""
    assert_same_logs(ours.logs, theirs.logs)
    assert len(ours.evaluations) == len(theirs.evaluations)
    if theirs.evaluations:
        assert_same_logs(ours.evaluations, theirs.evaluations)
    # Parameters are compared as a whole. Adam divides each gradient by its own size: the rounding
    # of a gradient near 0 moves its parameter as far as any other gradient would.
    learnt = theirs.parameters() - tiny.parameters(tiny.model())
    assert (ours.parameters() - theirs.parameters()).norm() < 1e-4 * learnt.norm()
