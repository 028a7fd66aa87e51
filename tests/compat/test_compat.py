"""klfast.compat against the frameworks' formulas, which ``compat_table`` states.

Each test is a promise of all rows: value and gradient, dtypes, masks, layouts, empty batches,
``exact=True``. ``test_compat_functions.py`` has the promises of single functions.
"""

import math

import pytest
import torch
from compat_rows import assert_same, doubles, inputs_of, outcome
from compat_table import COUNTS, ROWS, V

from klfast.compat import verl

pytestmark = pytest.mark.usefixtures("one_thread")

GARBAGE = (math.nan, math.inf, -math.inf)
exhaustive = pytest.mark.exhaustive
LOW = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=exhaustive)]


def every(select=lambda row: True):
    chosen = {name: row for name, row in ROWS.items() if select(row)}
    return pytest.mark.parametrize("row", chosen.values(), ids=chosen)


def assert_same_bits(found, expected):
    for mine, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert torch.equal(mine, other)


@every()
def test_value_and_gradients(row):
    inputs = inputs_of(row)
    found = outcome(row.ours, row, inputs)
    assert found[0][0].dtype == torch.float64
    assert_same(found, outcome(row.theirs, row, inputs), row, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@every()
def test_lower_dtypes_give_fp32_and_gradients_of_their_own(row, dtype):
    inputs = inputs_of(row, dtype)
    found = outcome(row.ours, row, inputs)
    assert found[0][0].dtype == torch.float32
    assert all(grad.dtype == dtype for grad in found[1])
    truth = outcome(row.theirs, row, doubles(inputs))
    assert_same(found, truth, row, rtol=3e-5, atol=1e-6)


@every(lambda row: row.per_token and row.leaves == 2)
def test_the_reference_s_dtype_may_be_another(row):
    inputs = inputs_of(row, torch.bfloat16)
    inputs[1] = inputs[1].float()
    values, grads = outcome(row.ours, row, inputs)
    assert values[0].dtype == torch.float32
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]
    truth = outcome(row.theirs, row, doubles(inputs))
    assert_same((values, grads), truth, row, rtol=3e-5, atol=1e-6)


@every(lambda row: row.per_token)
def test_any_layout(row):
    """Packed tokens, more dimensions, and tensors that are not contiguous."""
    inputs = inputs_of(row, torch.float32)
    values, grads = outcome(row.ours, row, inputs)
    tokens = values[0].shape
    for shape in ((tokens.numel(),), (1, *tokens, 1), (*reversed(tokens),)):

        def moved(t, shape=shape):
            if len(shape) == len(tokens):
                return t.transpose(0, 1)
            return t.reshape(*shape, *t.shape[len(tokens) :])

        mask = None if row.mask is None else moved(row.mask)
        found = outcome_moved(row, [moved(t) for t in inputs], mask, moved)
        for mine, other in zip([found[0][0], *found[1]], [values[0], *grads], strict=True):
            assert torch.equal(mine, moved(other))


def outcome_moved(row, inputs, mask, moved):
    """The outcome with an upstream gradient that is moved like its tokens."""
    leaves = [t.detach().requires_grad_() for t in inputs[: row.leaves]]
    given = [] if mask is None else [mask]
    value = row.ours(*leaves, *inputs[row.leaves :], *given)
    tokens = row.inputs(torch.float32)[0].shape[:2]
    upstream = torch.linspace(1, 1.75, value.numel(), dtype=value.dtype).view(tokens)
    return [value.detach()], torch.autograd.grad(value, leaves, moved(upstream))


@every(lambda row: row.mask is not None)
def test_what_is_masked_is_not_read(row):
    """Masked tokens hold NaN and both infinities in turn."""
    inputs, gone = inputs_of(row, torch.float32), row.mask == 0
    garbage = torch.tensor(GARBAGE).repeat(gone.numel())[: gone.sum()]
    dirty = [t.clone() for t in inputs]
    for t in dirty:
        if t.is_floating_point():
            t[gone] = garbage.view(-1, *[1] * (t.dim() - gone.dim())).expand_as(t[gone])
    found = outcome(row.ours, row, dirty)
    assert_same_bits(found, outcome(row.ours, row, inputs))
    assert all((grad[gone] == 0).all() for grad in found[1])


@every(lambda row: row.mask is not None)
def test_a_mask_may_have_any_dtype(row):
    inputs, mask = inputs_of(row, torch.float32), row.mask != 0
    expected = outcome(row.ours, row, inputs, mask.float())
    for other in (mask, mask.long()):
        assert_same_bits(outcome(row.ours, row, inputs, other), expected)


@every(lambda row: row.mask is not None and row.leaves)
def test_of_no_token_value_and_gradient_are_0(row):
    values, grads = outcome(row.ours, row, inputs_of(row), torch.zeros_like(row.mask))
    assert values[0].count_nonzero() == 0
    assert all(grad.count_nonzero() == 0 for grad in grads)


@every(lambda row: row.mask is not None and row.leaves and not row.per_token)
def test_a_batch_without_sequences_is_0(row):
    inputs = [t[:0] for t in inputs_of(row)]
    assert outcome(row.ours, row, inputs, row.mask[:0])[0][0].sum() == 0


@every(lambda row: row.drops_last)
def test_a_word_that_nobody_says_adds_nothing(row):
    inputs = inputs_of(row)
    for t in inputs:
        if t.is_floating_point():
            t[..., -1] = -math.inf
    fewer = [t[..., :-1] if t.is_floating_point() else t for t in inputs]
    values, grads = outcome(row.ours, row, inputs)
    few, few_grads = outcome(row.ours, row, fewer)
    assert all(grad[..., V - 1].count_nonzero() == 0 for grad in grads)
    cut = [grad[..., :-1] for grad in grads]
    assert_same((values, cut), (few, few_grads), row, rtol=1e-12, atol=1e-14)


@every(lambda row: row.exact)
def test_exact_lets_through_what_theirs_does(row):
    """``exact`` gives the framework's numbers, and NaN where it multiplies by the mask."""
    inputs = inputs_of(row)
    truth = outcome(row.theirs, row, inputs)
    assert_same(outcome(row.ours, row, inputs, exact=True), truth, row, rtol=1e-11, atol=1e-13)
    if row.mask is not None:
        inputs[0][row.mask == 0] = math.nan
        found, theirs = (
            function(*inputs, row.mask, **options)
            for function, options in ((row.ours, {"exact": True}), (row.theirs, {}))
        )
        torch.testing.assert_close(found, theirs, rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@every(lambda row: row.exact)
def test_exact_keeps_the_dtype_and_changes_no_other_number(row, dtype):
    inputs = inputs_of(row, dtype)
    mask = row.mask if row.mask is None else torch.ones_like(row.mask).to(dtype)
    values, grads = outcome(row.ours, row, inputs, mask)
    exact, exact_grads = outcome(row.ours, row, inputs, mask, exact=True)
    assert exact[0].dtype == dtype
    assert torch.equal(exact[0], values[0].to(dtype))
    eps = torch.finfo(dtype).eps
    for mine, other in zip(exact_grads, grads, strict=True):  # the upstream gradient is rounded
        assert (mine.double() - other.double()).norm() <= 2 * eps * other.double().norm()


COMPILED = [
    "openrlhf unbiased old k3",
    "verl logprobs",
    pytest.param("trl kl_loss grpo of sequences", marks=exhaustive),
    pytest.param("trl logprobs of several", marks=exhaustive),
    pytest.param("roll full", marks=exhaustive),
    pytest.param("roll reverse_kl 0.5 padded", marks=exhaustive),
]


# Importing all of dynamo warns, and it makes a Function object to trace any autograd.Function.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"
)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(name):
    row = ROWS[name]
    inputs = inputs_of(row, torch.float32)
    eager = outcome(row.ours, row, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(row.ours, backend="eager", fullgraph=True)
    assert_same(outcome(compiled, row, inputs), eager, row, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", verl.REDUCTIONS)
@pytest.mark.parametrize("name", ["agg_loss", "kl_loss"])
def test_verl_s_ranks_need_the_global_count(name, mode):
    row = ROWS[f"verl {name} {mode}{' k3' if name == 'kl_loss' else ''} local"]
    inputs = inputs_of(row)
    if mode == "token-sum":
        assert row.ours(*inputs, row.mask, dp_size=2) == 2 * row.ours(*inputs, row.mask)
        return
    missing = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    others = {name: value for name, value in COUNTS["global"].items() if name != missing}
    with pytest.raises(ValueError, match=f"{missing} must be given when dp_size > 1"):
        row.ours(*inputs, row.mask, **others)
