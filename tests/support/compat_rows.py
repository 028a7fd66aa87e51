"""The engine of ``compat_table`` runs a function of a row and compares two results."""

import oracle
import torch


def inputs_of(row, dtype=torch.float64):
    return [t.to(dtype) if t.is_floating_point() else t for t in row.inputs(dtype)]


def doubles(tensors):
    return [t.double() if t.is_floating_point() else t for t in tensors]


def outcome(function, row, inputs, mask="the row's", **options):
    """(values, gradients of the first value for an uneven incoming gradient)."""
    mask = row.mask if isinstance(mask, str) else mask
    leaves = [t.detach().requires_grad_() for t in inputs[: row.leaves]]
    values = function(*leaves, *inputs[row.leaves :], *([] if mask is None else [mask]), **options)
    values = values if isinstance(values, tuple) else (values,)
    values = [
        v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=torch.float64) for v in values
    ]
    grads = ()
    if row.leaves:
        upstream = torch.linspace(1, 1.75, values[0].numel(), dtype=values[0].dtype)
        grads = torch.autograd.grad(values[0], leaves, upstream.view(values[0].shape))
    return [value.detach() for value in values], grads


def assert_same(found, truth, row, *, rtol, atol):
    """The terms of a gradient may cancel. They are as large as the neighbouring gradients."""
    for value, exact in zip(found[0], truth[0], strict=True):
        close = {"rtol": rtol, "atol": atol + row.off, "equal_nan": True}
        torch.testing.assert_close(value.double(), exact.double(), **close)
    terms = sum((grad.abs() for grad in truth[1]), torch.zeros(()))
    if truth[1] and truth[0][0].shape == truth[1][0].shape:
        terms = terms + truth[0][0].abs()
    for grad, exact in zip(found[1], truth[1], strict=True):
        own = 2 * torch.finfo(grad.dtype).eps * (exact.abs() + 1.75 * row.sums)
        oracle.assert_within(grad, exact, rtol * terms + own + atol + row.off, "gradient")
