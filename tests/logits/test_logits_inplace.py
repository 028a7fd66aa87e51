"""inplace_backward=True: the gradient takes the logits' memory, or an error says why it cannot."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import FLOATS, leaves, random_ids, random_logits
from around import Passed
from torch.func import grad, vmap

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")


def computed(dtype=torch.float32, shape=(2, 3, 37)):
    """(leaf, logits that a model has computed from it, token ids)."""
    (leaf,) = leaves(random_logits(*shape, dtype=dtype)[0])
    return leaf, leaf * 1, random_ids(leaf)


def call(logits, ids, backend, **options):
    return klfast.token_logprobs(logits, ids, inplace_backward=True, backend=backend, **options)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("return_entropy", [False, True])
def test_the_gradient_is_the_usual_one_in_the_memory_of_the_logits(backend, dtype, return_entropy):
    leaf, logits, ids = computed(dtype)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    options = {"return_entropy": return_entropy, "mask": mask, "temperature": 0.7}
    expected = klfast.token_logprobs(leaf, ids, backend=backend, **options)
    expected = expected if return_entropy else (expected,)
    upstream = [torch.randn(2, 3, dtype=output.dtype) for output in expected]
    (expected_grad,) = torch.autograd.grad(expected, leaf, upstream)

    address, version, given = logits.data_ptr(), logits._version, []
    logits.register_hook(given.append)
    found = call(logits, ids, backend, **options)
    found = found if return_entropy else (found,)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True))
    assert logits._version == version
    torch.autograd.backward(found, upstream)
    assert same_bits(leaf.grad, expected_grad)
    assert given[0].data_ptr() == address
    assert same_bits(logits.detach(), expected_grad)
    assert logits._version > version
    assert not leaf.grad[0, 2].any()


def test_without_a_gradient_nothing_is_changed(backend):
    _, logits, ids = computed()
    before = logits.detach().clone()
    call(logits.detach(), ids, backend)
    with torch.no_grad():
        call(logits, ids, backend)
    assert same_bits(logits.detach(), before)
    assert logits._version == 0


def test_a_leaf_is_refused(backend):
    leaf, _, ids = computed()
    for logits in (leaf, leaf[:1], leaf.view(3, 2, 37), leaf.detach().requires_grad_()):
        with pytest.raises(
            ValueError, match=r"inplace_backward=True needs logits that a model has"
        ):
            call(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64), backend)
    assert call(leaf.detach(), ids, backend).shape == (2, 3)


class PassedBeside(Passed):
    @staticmethod
    def forward(ctx, other, logits):
        return logits.detach()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


PASSING = {
    "twice": lambda t: Passed.apply(Passed.apply(t)),
    "then-viewed": lambda t: Passed.apply(t).view(3, 2, 37),
    "of-a-slice": lambda t: Passed.apply(t[:1]),
    "beside-another": lambda t: PassedBeside.apply(torch.ones(3, requires_grad=True) * 2, t),
}


@pytest.mark.parametrize("passing", PASSING.values(), ids=PASSING)
def test_a_leaf_behind_a_function_that_returns_its_memory_is_refused(backend, passing):
    leaf, _, _ = computed()
    logits = passing(leaf)
    with pytest.raises(ValueError, match=r"inplace_backward=True needs logits that a model has"):
        call(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64), backend)


def test_a_negated_view_is_refused(backend):
    _, logits, ids = computed()
    with pytest.raises(ValueError, match="needs logits whose memory holds their values"):
        call(torch._neg_view(logits), ids, backend)
    resolved = torch._neg_view(logits).resolve_neg()
    call(resolved, ids, backend).sum().backward()


@pytest.mark.parametrize(
    "layout",
    [lambda t: t.transpose(0, 1), lambda t: t[:, :-1], lambda t: t[..., ::2]],
    ids=["transposed", "sliced", "stepped"],
)
def test_logits_that_are_not_contiguous_are_refused(backend, layout):
    _, logits, _ = computed()
    logits = layout(logits)
    ids = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    with pytest.raises(ValueError, match=r"inplace_backward=True needs contiguous logits, got str"):
        call(logits, ids, backend)


def test_a_second_backward_raises(backend):
    _, logits, ids = computed()
    found = call(logits, ids, backend).sum()
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"serves one backward|modified by an inplace operation"):
        found.backward()


def test_create_graph_raises_and_changes_nothing(backend):
    leaf, logits, ids = computed()
    before = logits.detach().clone()
    found = call(logits, ids, backend).sum()
    with pytest.raises(RuntimeError, match="serves one backward"):
        torch.autograd.grad(found, leaf, create_graph=True)
    assert same_bits(logits.detach(), before)


def test_another_op_that_saved_the_logits_is_told(backend):
    """By autograd, which sees that its tensor was modified: never a wrong gradient."""
    leaf, logits, ids = computed()
    other = logits.exp().sum() + logits.square().sum()
    loss = call(logits, ids, backend).sum() + other
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert leaf.grad is None


def test_two_calls_on_the_same_logits_are_told(backend):
    _, logits, ids = computed()
    both = call(logits, ids, backend).sum() + call(logits, ids, backend).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()


def test_it_is_refused_under_transforms(backend):
    leaf, _, ids = computed()

    def loss(logits, ids):
        return call(logits * 1, ids, backend).sum()

    with pytest.raises(ValueError, match=r"cannot be used under torch.compile or torch.func"):
        grad(loss)(leaf.detach(), ids)
    with pytest.raises(ValueError, match=r"cannot be used under torch.compile or torch.func"):
        vmap(loss)(leaf.detach(), ids)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"cannot be used under torch.compile or torch.func"):
        torch.compile(loss, fullgraph=True, backend="eager")(leaf, ids)
