"""Autograd over every public function. The tests say who gets a gradient, how often, and what may
happen between the forward and the backward.
"""

import itertools
import re

import pytest
import torch
from agreement import all_same_bits, same_bits
from families import GRADED, VARIANTS, WIDE, Function, every, weights
from torch.utils.checkpoint import checkpoint

from klfast.types.reduction import REDUCTIONS


@pytest.fixture
def function(of, backend):
    return Function(of, backend)


every_graded = every(GRADED)
CHANGED = "modified by an inplace operation|must keep its shape and storage"


@every_graded
def test_gradients_are_those_of_quotients(of, backend):
    function = Function(of, backend, dtypes=WIDE)
    assert torch.autograd.gradcheck(function.values, function.leaves(), fast_mode=True)


@every_graded
def test_a_gradient_does_not_depend_on_who_else_asks(of, backend):
    function = Function(of, backend, dtypes=WIDE)
    together = function.gradients(*function.leaves())
    for at, expected in enumerate(together):
        leaves = [leaf.requires_grad_(i == at) for i, leaf in enumerate(function.leaves())]
        loss = function.loss(*leaves)
        if not loss.requires_grad:  # an output of the other model alone
            continue
        (alone,) = torch.autograd.grad(loss, leaves[at])
        torch.testing.assert_close(alone, expected, rtol=1e-12, atol=1e-15)


@every_graded
def test_gradients_have_memory_of_their_own(function):
    """Each of them, at each backward of a graph that is retained."""
    leaves, expected = function.known()
    loss = function.loss(*leaves)
    for _ in range(3):
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        for grad, wanted in zip(found, expected, strict=True):
            assert same_bits(grad, wanted)
            grad.fill_(torch.nan)


LAYOUTS = {
    "expanded": lambda g: g[:1].expand_as(g),
    "one number": lambda g: g[(0,) * g.dim()].expand_as(g),
    "transposed": lambda g: g.mT.contiguous().mT if g.dim() > 1 else g,
    "stepped": lambda g: g.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view_as(g),
}


def is_scalar(of):
    family, variant = of
    return REDUCTIONS[VARIANTS[family][variant].get("reduction", "none")].is_scalar()


@every([of for of in GRADED if not is_scalar(of)])
def test_an_incoming_gradient_may_have_any_layout(function):
    leaves = function.leaves()
    values = function.values(*leaves)
    for layout in LAYOUTS.values():
        sent = [layout(weights(value)) for value in values]
        found = torch.autograd.grad(values, leaves, sent, retain_graph=True)
        sent = [grad.contiguous() for grad in sent]
        assert all_same_bits(found, torch.autograd.grad(values, leaves, sent, retain_graph=True))


@every_graded
def test_outputs_without_an_incoming_gradient_count_as_zeros(function):
    leaves = function.leaves()
    values = function.values(*leaves)
    for value in values:
        sent = [weights(v) * (v is value) for v in values]
        options = {"retain_graph": True, "materialize_grads": True}
        alone = torch.autograd.grad(value, leaves, weights(value), **options)
        torch.testing.assert_close(alone, torch.autograd.grad(values, leaves, sent, **options))


@every_graded
def test_a_second_derivative_raises_or_is_right(of, backend):
    """Above all it is not silently 0."""
    function = Function(of, backend, dtypes=WIDE)
    leaves, expected = function.known()
    found = torch.autograd.grad(function.loss(*leaves), leaves, create_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    if backend == "reference":
        assert torch.autograd.gradgradcheck(function.values, leaves, fast_mode=True)
        return
    with pytest.raises(RuntimeError, match=r"differentiable once.*backend='reference'"):
        torch.autograd.grad(sum(grad.square().sum() for grad in found), leaves)


@every_graded
def test_without_a_need_there_is_no_graph(function):
    leaves = function.leaves()
    expected = [value.detach() for value in function.values(*leaves)]
    with torch.no_grad():
        in_no_grad = function.values(*leaves)
    with torch.inference_mode():
        in_inference = function.values(*leaves)
    detached = function.values(*(leaf.detach() for leaf in leaves))
    for found in (in_no_grad, in_inference, detached):
        assert not any(value.requires_grad for value in found)
        assert all_same_bits(found, expected)


@every_graded
def test_constants_may_be_inference_tensors_and_change(function):
    """Reference models run in inference mode. Autograd does not see changes of their tensors."""
    leaves, expected = function.known()
    others = {n: t for n, t in function.call.tensors.items() if n not in function.call.leaves}
    with torch.inference_mode():
        constants = {name: tensor.clone() for name, tensor in others.items()}
    function.call.tensors.update(constants)
    loss = function.loss(*leaves)
    with torch.inference_mode():
        for constant in constants.values():
            if constant.is_floating_point():
                constant.add_(5)
    for _ in range(2):
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@every_graded
def test_an_input_that_changed_raises_or_does_not_matter(function):
    leaves, expected = function.known()
    tensors = {**function.call.tensors}
    floats = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    for name, is_unseen in itertools.product(floats, (False, True)):
        function.call.tensors.update({n: t.clone() for n, t in tensors.items()})
        inputs = {n: leaf * 1 for n, leaf in zip(function.call.leaves, leaves, strict=True)}
        loss = function.loss(*inputs.values())
        changed = (function.call.tensors | inputs)[name]
        if is_unseen:
            changed.data = changed.detach() + 1
        else:
            with torch.no_grad():
                changed.add_(1)
        try:
            found = torch.autograd.grad(loss, leaves)
        except RuntimeError as error:
            if not re.search(CHANGED, str(error)):
                raise
        else:
            torch.testing.assert_close(found, expected)


@every_graded
def test_a_graph_that_was_freed_says_so(function):
    loss = function.loss(*function.leaves())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@every([of for of in GRADED if "log-probs" not in of[0]])
def test_outputs_may_be_changed_in_place(of, backend):
    """Ranks add up statistics in place. The backward reads log-probs and entropies. Autograd raises
    if these change.
    """
    function = Function(of, backend, ids=None, return_entropy=False)
    leaves, expected = function.known()
    outputs = function(*leaves)
    for output in outputs:
        if output.is_floating_point():
            output.mul_(4)
    values = [output for output in outputs if output.requires_grad]
    found = torch.autograd.grad(values, leaves, [weights(value) for value in values])
    assert all_same_bits(found, [4 * grad for grad in expected])


@every_graded
def test_saved_tensors_may_be_kept_elsewhere(function):
    """Offloading: whatever is saved comes back as a copy."""
    leaves, expected = function.known()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = function.loss(*leaves)
    for _ in range(2):
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@every_graded
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpointed_call_has_the_bits_of_a_plain_one(function, use_reentrant):
    leaves, expected = function.known()
    loss = checkpoint(function.loss, *leaves, use_reentrant=use_reentrant)
    loss.backward()
    assert all_same_bits([leaf.grad for leaf in leaves], expected)
    if use_reentrant:
        return
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        checkpoint(lambda *t: function.loss(*(x * 1 for x in t)), *leaves, use_reentrant=False)
    assert {id(t) for t in saved if t.numel()} <= {id(leaf) for leaf in leaves}
