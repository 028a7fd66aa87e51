"""Frameworks' own functions, run in float64 on the stored inputs, against klfast's in any dtype."""

import inspect
import math

import pytest
import torch
from agreement import random_inputs
from agreement_logits import random_logits
from oracle import assert_within

from klfast.cli.check.calls import Call
from klfast.cli.check.compare import truth_of

SPREADS = {"near": 1e-4, "random": 0.3, "wide": 4.0, "extreme": 25.0}
"""Standard deviation of the log-ratio, nats."""

every_spread = pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)


def inputs(spread, dtype, shape=(6, 40)):
    """(logprobs, ref_logprobs, old_logprobs, mask); one sequence is whole, one has no token."""
    lengths = torch.linspace(0, shape[1], shape[0]).long()
    mask = torch.arange(shape[1]) < lengths[:, None]
    return *random_inputs(shape, dtype, spread), mask


def assert_same_arguments(theirs, ours, *names):
    """The framework's names, order, kinds and defaults come first in klfast's functions.

    Without ``names``, of two functions; else of two modules' functions of these names.
    """
    pairs = [(getattr(theirs, name), getattr(ours, name)) for name in names] or [(theirs, ours)]
    for pair in pairs:
        wanted, given = (
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
            for f in pair
        )
        assert given[: len(wanted)] == wanted, pair


def assert_agrees(ours, theirs, logprobs, ref_logprobs, *others):
    """Value and both gradients of ``ours(logprobs, ref, *others)`` are those of ``theirs``.

    Each within klfast's promise for its tokens (a relative 4e-7 for log-ratios up to 1,
    (2 + abs(x)) * 1.2e-7 beyond; twice that where a weight has the same), the rounding to the
    output's dtype, and in a sum that of adding up to 16 fp32 numbers. The framework's own formula
    rounds too, in float64.
    """
    value, grads = _differentiate(ours, logprobs, ref_logprobs, *others)
    wide = [t.double() if t.is_floating_point() else t for t in others if torch.is_tensor(t)]
    rest = [t for t in others if not torch.is_tensor(t)]
    truth, true_grads = _differentiate(
        theirs, logprobs.double(), ref_logprobs.double(), *wide, *rest
    )
    log_ratio = (logprobs.double() - ref_logprobs.double()).abs()
    _assert_close(value, truth, log_ratio)
    for grad, true_grad in zip(grads, true_grads, strict=True):
        _assert_close(grad, true_grad, log_ratio)


def _differentiate(function, logprobs, ref_logprobs, *others):
    """The value, and the gradient of both inputs under an uneven gradient that comes in."""
    leaves = [t.detach().clone().requires_grad_() for t in (logprobs, ref_logprobs)]
    value = function(*leaves, *others)
    return value.detach(), torch.autograd.grad(value, leaves, _uneven(value.shape).to(value.dtype))


def _assert_close(actual, truth, log_ratio):
    relative = torch.where(log_ratio <= 1, 4e-7, 1.2e-7 * (2 + log_ratio))
    if truth.shape != log_ratio.shape:  # reduced; of losses that do not cancel
        relative, log_ratio = relative.max() + 16 * 2.0**-24, log_ratio.max()
    if actual.dtype == torch.float64:
        relative = 0.0
    theirs = 2e-15 * (1 + truth.abs()) * (1 + log_ratio)
    allowed = (2 * relative + torch.finfo(actual.dtype).eps) * truth.abs() + theirs
    wrong = ~((actual.double() - truth).abs() <= allowed)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ: got {actual[wrong][:3].tolist()}, "
        f"truth {truth[wrong][:3].tolist()}"
    )


def assert_logprobs_agree(ours, theirs, logits, index, temperature=1.0):
    """Value and gradient of ``ours(logits, index)`` are those of ``theirs``, as rounding allows.

    ``index``: [...], or several words [..., K] of each row, whose gradients are added up.
    """
    _assert_rows_agree(ours, theirs, "logprobs", temperature, logits, index)


def assert_entropies_agree(ours, theirs, logits, temperature=1.0):
    """The same of ``ours(logits)``."""
    _assert_rows_agree(ours, theirs, "entropy", temperature, logits)


def _assert_rows_agree(ours, theirs, name, temperature, logits, *index):
    value, grad = _differentiate_logits(ours, logits, *index)
    truth, true_grad = _differentiate_logits(theirs, logits.double(), *index)
    ids = index[0] if index else torch.zeros(logits.shape[:-1], dtype=torch.int64)
    tensors = {"logits": logits, "token_ids": ids}
    options = {"temperature": temperature, "return_entropy": name == "entropy"}
    allowed = truth_of(Call("token_logprobs", tensors, options, ("logits",))).allowed
    assert_within(value, truth, allowed[name], name)
    assert_within(grad, true_grad, allowed["gradient of logits"], "gradient")


def assert_no_farther(ours, theirs, logits, *others):
    """In low precision ``ours`` has the dtype of ``theirs``, and is as near to its float64 truth.

    But for one rounding, which each makes of what it returns.
    """
    truth, mine, other = (
        function(x, *others)
        for function, x in ((theirs, logits.double()), (ours, logits), (theirs, logits))
    )
    assert mine.dtype == other.dtype == logits.dtype
    rounding = torch.finfo(logits.dtype).eps / 2 * truth.abs()
    assert ((mine - truth).abs() <= (other - truth).abs() + rounding).all()


def logits_and_index(dtype, shape=(3, 5), words=None, vocabulary=50):
    """Logits as models make them, and words of each row."""
    logits, _ = random_logits(*shape, vocabulary, dtype=dtype)
    return logits, torch.randint(vocabulary, shape if words is None else (*shape, words))


def _differentiate_logits(function, logits, *others):
    leaf = logits.detach().clone().requires_grad_()
    value = function(leaf, *others)
    upstream = _uneven(value.shape).to(value.dtype)
    return value.detach(), torch.autograd.grad(value, leaf, upstream)[0]


def _uneven(shape):
    return torch.linspace(1, 1.75, math.prod(shape), dtype=torch.float64).reshape(shape)
