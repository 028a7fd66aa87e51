"""Comparisons of frameworks' own functions with klfast's, in the rows of ``compat_table``.

``tests/compat`` compares klfast with formulas in every dtype. Here a framework's own code runs in
float64 on the same inputs, and must have klfast's numbers and gradients.
"""

import contextlib
import inspect
import runpy

import compat_table
import pytest
import torch
from agreement import random_inputs
from compat_rows import assert_same, inputs_of, outcome
from compat_table import ROWS

import klfast

KLS = [0.02, 0.3, 0.11, 5.9, 6.5, 20.0, -1.0, 0.1] * 10


def inputs(spread, dtype, shape=(6, 40)):
    """(logprobs, ref_logprobs, old_logprobs, mask). One sequence is whole, one has no token."""
    lengths = torch.linspace(0, shape[1], shape[0]).long()
    mask = torch.arange(shape[1]) < lengths[:, None]
    return *random_inputs(shape, dtype, spread), mask


def assert_same_arguments(theirs, ours, *names):
    """The framework's arguments come first in klfast's: names, order, kinds and defaults.

    With ``names`` the arguments are two modules, without them two functions.
    """
    pairs = [(getattr(theirs, name), getattr(ours, name)) for name in names] or [(theirs, ours)]
    for pair in pairs:
        wanted, given = (
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
            for f in pair
        )
        assert given[: len(wanted)] == wanted, pair


def same_numbers(module, theirs, *begins, rtol=1e-11, atol=1e-13):
    """Make a test of the rows whose names begin with these words.

    ``theirs`` maps names in the module of ``klfast.compat`` to the framework's functions.
    """
    calls, made = [], {}
    names = [n for n in ROWS if any(f"{n} ".startswith(f"{begin} ") for begin in begins)]

    def counted(function):
        return lambda *args, **options: calls.append(function) or function(*args, **options)

    @pytest.mark.parametrize("name", names)
    def test(name):
        row = ROWS[name]
        inputs = inputs_of(row)
        found = outcome(row.ours, row, inputs)
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            for of, function in theirs.items():
                patch.setattr(module, of, counted(function))
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            made.update(made or runpy.run_path(compat_table.__file__)["ROWS"])
            truth = outcome(made[name].ours, row, inputs)
        assert calls
        assert_same(found, truth, row, rtol=rtol, atol=atol)

    return test


def assert_same_controllers(theirs, ours):
    """The coefficients are equal bit for bit over many updates."""
    for kl in KLS:
        theirs.update(kl, 128)
        ours.update(kl, 128)
        assert ours.value == theirs.value


@contextlib.contextmanager
def reaching(framework, *holders, **options):
    """Patch, and check that every ``(module, name)`` is replaced and restored at the end."""
    before = [getattr(module, name) for module, name in holders]
    with klfast.compat.patch(framework, **options) as made:
        for (module, name), old in zip(holders, before, strict=True):
            assert getattr(module, name) is not old, (module, name)
        yield made
    assert [getattr(module, name) for module, name in holders] == before


def assert_close(ours, theirs, **options):
    """The tensors of two lists agree."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **{"rtol": 1e-5, "atol": 1e-7, **options})


def assert_no_farther(ours, theirs, logits, *others):
    """In low precision ``ours`` has the dtype of ``theirs`` and is as near to the float64 truth.

    Each result may have one rounding more.
    """
    truth, mine, other = (
        function(x, *others)
        for function, x in ((theirs, logits.double()), (ours, logits), (theirs, logits))
    )
    assert mine.dtype == other.dtype == logits.dtype
    rounding = torch.finfo(logits.dtype).eps / 2 * truth.abs()
    assert ((mine - truth).abs() <= (other - truth).abs() + rounding).all()


def logits_and_index(dtype, shape=(3, 5), vocabulary=50):
    """Random logits, and a token id of each row."""
    return torch.randn(*shape, vocabulary).to(dtype), torch.randint(vocabulary, shape)
