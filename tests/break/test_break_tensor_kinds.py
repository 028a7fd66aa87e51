"""Meta and fake tensors, subclasses, parameters, defaults: what klfast makes of each."""

import itertools

import pytest
import torch
from controls import FLOATS, REDUCTIONS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import klfast

pytestmark = pytest.mark.filterwarnings("ignore:klfast uses its slow reference backend on meta")
CATEGORY = "meta, fake, subclasses, parameters"


def calls():
    """(name, function of tensors, how many log-probs, how many logits) by reduction."""
    for reduction in REDUCTIONS:
        yield (
            f"kl_penalty {reduction}",
            lambda a, b, n=reduction: klfast.kl_penalty(a, b, reduction=n, return_stats=True),
            (2, 3),
        )
        yield (
            f"kl_divergence {reduction}",
            lambda a, b, n=reduction: klfast.kl_divergence(a, b, reduction=n, return_stats=True),
            (2, 3, 5),
        )
    yield (
        "kl_rewards",
        lambda a, b: klfast.kl_rewards(b.new_ones(2), a, b, kl_coef=0.5, return_stats=True),
        (2, 3),
    )
    for entropy in (False, True):
        yield (
            f"token_logprobs {entropy}",
            lambda a, b, e=entropy: klfast.token_logprobs(
                a, b.new_zeros((2, 3), dtype=torch.int64), return_entropy=e
            ),
            (2, 3, 5),
        )


def flat(outputs):
    return [part for part in torch.utils._pytree.tree_leaves(outputs) if part is not None]


def inputs(shape, first=torch.float32, second=torch.float32, **options):
    a = torch.randn(shape)
    return a.to(first, **options), (a + 0.1 * torch.randn(shape)).to(second, **options)


def compare_shapes(hunt, found, expected, device, *case):
    for got, wanted in zip(flat(found), flat(expected), strict=True):
        hunt.equal(
            (tuple(got.shape), got.dtype, got.device.type, got.requires_grad),
            (tuple(wanted.shape), wanted.dtype, device, wanted.requires_grad),
            *case,
        )


@pytest.mark.parametrize("needs", [False, True], ids=["constant", "differentiable"])
def test_meta_tensors_have_the_shapes_and_dtypes_of_results(hunt, needs):
    pairs = itertools.product(FLOATS, FLOATS)
    for (name, call, shape), (first, second) in itertools.product(calls(), pairs):
        a, b = inputs(shape, first, second)
        expected = call(a.requires_grad_(needs), b)
        on_meta = (a.detach().to("meta").requires_grad_(needs), b.to("meta"))
        compare_shapes(hunt, call(*on_meta), expected, "meta", name, first, second)


@pytest.mark.parametrize("needs", [False, True], ids=["constant", "differentiable"])
def test_fake_tensors_have_the_shapes_and_dtypes_of_results(hunt, needs):
    for (name, call, shape), first in itertools.product(calls(), FLOATS):
        a, b = inputs(shape, first)
        expected = call(a.requires_grad_(needs), b)
        with FakeTensorMode() as mode:
            fake = (mode.from_tensor(a), mode.from_tensor(b))
            found = call(*fake)
            compare_shapes(hunt, found, expected, "cpu", name, first)
            if needs and flat(found)[0].requires_grad:
                (grad,) = torch.autograd.grad(flat(found)[0].sum(), fake[0])
                hunt.equal((grad.shape, grad.dtype), (a.shape, a.dtype), name, first)


def test_two_tensors_are_two_calls(hunt):
    for name, call, shape in calls():
        a, b = inputs(shape)
        c, d = inputs(shape)
        first, second = flat(call(a, b)), flat(call(c, d))
        found = flat(call(TwoTensor(a, c), TwoTensor(b, d)))
        for got, one, other in zip(found, first, second, strict=True):
            hunt.check(isinstance(got, TwoTensor), name, got=type(got))
            if isinstance(got, TwoTensor):
                hunt.bits(got.a, one, name)
                hunt.bits(got.b, other, name)


class Named(torch.Tensor):
    """A subclass that adds nothing."""


@pytest.mark.parametrize(
    "kind",
    [
        lambda t: torch.nn.Parameter(t),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
        lambda t: torch.nn.Buffer(t),
        lambda t: t.as_subclass(Named),
        lambda t: t.clone().requires_grad_(),
        lambda t: t.share_memory_(),
    ],
    ids=["parameter", "frozen", "buffer", "subclass", "leaf", "shared"],
)
def test_what_is_a_tensor_by_another_name(hunt, kind):
    for name, call, shape in calls():
        a, b = inputs(shape)
        for got, wanted in zip(
            flat(call(kind(a.clone()), kind(b.clone()))), flat(call(a, b)), strict=True
        ):
            hunt.bits(got.detach().as_subclass(torch.Tensor), wanted, name)


def test_defaults_change_nothing(hunt):
    for (name, call, shape), dtype in itertools.product(calls(), FLOATS):
        a, b = inputs(shape)
        expected = flat(call(a, b))
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)
            with torch.device("meta"):
                found = flat(call(a, b))
        finally:
            torch.set_default_dtype(before)
        for got, wanted in zip(found, expected, strict=True):
            hunt.bits(got, wanted, name, dtype)
