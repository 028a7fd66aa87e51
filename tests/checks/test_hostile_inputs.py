"""Every public function gets tensors of rare kinds, odd contexts, bad numbers and large sizes."""

import contextlib
import inspect
import itertools
import math

import pytest
import torch
from agreement import same_bits
from around import Passed, default_dtype
from every_function import KEPT, computed, every_function, tensors_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import klfast

NAN, INF = math.nan, math.inf
NAMES = list(every_function())
every_name = pytest.mark.parametrize("name", NAMES)

pytestmark = [
    pytest.mark.filterwarnings("ignore:klfast uses its slow reference backend on meta"),
    # Torch warns when rare tensors are made.
    pytest.mark.filterwarnings("ignore:.*(nested|[Ss]parse|quantized|Anomaly Detection)"),
]


def given(name, **options):
    """A function and its arguments, a mask among them."""
    function, arguments = every_function()[name]
    return function, {**arguments, "mask": KEPT, **options}


def parameters(name):
    return inspect.signature(every_function()[name][0]).parameters


def with_all_results(name):
    """``given``, with a scalar result and all other outputs."""
    wanted = {"reduction": "token-mean", "return_stats": True, "return_entropy": True}
    return given(name, **{key: wanted[key] for key in wanted if key in parameters(name)})


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one.as_subclass(torch.Tensor), other)


class Named(torch.Tensor):
    """A subclass that adds nothing."""


def conjugate(tensor):
    """The same numbers as the imaginary part of a conjugate, which is a view with a sign bit."""
    if not tensor.is_floating_point():
        return tensor
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


KINDS = {
    "parameter": lambda t: torch.nn.Parameter(t) if t.requires_grad else t,
    "buffer": lambda t: t if t.requires_grad else torch.nn.Buffer(t),
    "subclass": lambda t: t.as_subclass(Named),
    "shared": lambda t: t.detach().share_memory_().requires_grad_(t.requires_grad),
    "negated": lambda t: torch._neg_view(-t) if t.is_floating_point() else t,
    "conjugate": conjugate,
}


@every_name
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_is_its_numbers(name, kind):
    function, arguments = with_all_results(name)
    assert_same(computed(function, arguments, KINDS[kind]), computed(function, arguments))


AROUND = {
    "autocast-bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast-fp16": lambda: torch.autocast("cpu", torch.float16),
    "default-dtype": default_dtype,
    "default-device": lambda: torch.device("meta"),
    "saved-and-mutable": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "anomaly": torch.autograd.detect_anomaly,
    "one-thread": lambda: torch.autograd.set_multithreading_enabled(False),
}


@every_name
@pytest.mark.parametrize("around", AROUND)
def test_nothing_around_a_call_changes_its_bits(name, around):
    if "autocast" in around and "linear" in name:
        pytest.skip("autocast chooses the matmul's dtype")
    function, arguments = with_all_results(name)
    found = computed(function, arguments, around=AROUND[around])
    assert_same(found, computed(function, arguments))


@every_name
def test_hooks_see_the_gradients_once(name):
    function, arguments = given(name)
    expected = computed(function, arguments)
    seen = []

    def hooked(tensor):
        tensor = tensor * 1.0 if tensor.requires_grad else tensor
        if tensor.requires_grad:
            tensor.grad_fn.register_prehook(lambda grads: seen.append(len(grads)))
            tensor.register_hook(lambda grad: 2 * grad)
        return tensor

    found = computed(function, arguments, hooked)
    plain = sum(1 for value in arguments.values() if getattr(value, "requires_grad", False))
    outputs = len(expected) - plain
    assert len(found) == len(expected)
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other if at < outputs else 2 * other)


@every_name
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_tensors_without_numbers_give_the_shapes_and_dtypes(name, device):
    function, arguments = with_all_results(name)
    expected = computed(function, arguments)
    with FakeTensorMode() if device == "fake" else contextlib.nullcontext() as mode:
        place = mode.from_tensor if mode else lambda t: t.to("meta").detach()
        handed = {
            key: place(value).requires_grad_(value.requires_grad)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in arguments.items()
        }
        found = tensors_of(function(**handed))
        leaves = [t for t in tensors_of(handed) if t.requires_grad]
        graded = [t for t in found if t.requires_grad]
        ones = [torch.ones_like(t) for t in graded]
        found += torch.autograd.grad(graded, leaves, ones) if graded else ()
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.device.type == ("meta" if device == "meta" else "cpu")


PER_TOKEN = [
    *("kl_penalty", "kl_penalty(old)", "token_logprobs", "kl_divergence", "topk_kl_divergence"),
    *("linear_token_logprobs", "linear_topk_kl_divergence", "linear_kl_divergence"),
    "rollout_correction",
]
POISONS = (NAN, INF, -INF, 3e38, -3e38, 1e-40)


def poisoned(arguments, poison):
    """Every tensor over tokens has a bad number in the token [1, 0]."""
    made = {}
    for key, value in arguments.items():
        made[key] = value
        if isinstance(value, torch.Tensor) and value.shape[:2] == KEPT.shape and key != "mask":
            made[key] = value.detach().clone()
            made[key][1, 0] = poison if value.is_floating_point() else 2**62
            made[key].requires_grad_(value.requires_grad)
    return made


@every_name
def test_no_number_under_the_mask_changes_a_bit(name):
    """Neither a result nor a gradient changes, and the masked gradient is 0."""
    function, arguments = with_all_results(name)
    mask = torch.tensor([[1.0, 0.5, 1.0], [0.0, 1.0, 0.0]])
    arguments |= {"mask": mask}
    expected = computed(function, arguments)
    for poison in POISONS:
        assert_same(computed(function, poisoned(arguments, poison)), expected)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_bad_number_shows_in_its_own_token_alone(name):
    function, arguments = given(name, mask=None)
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            value.requires_grad_(False)
    (expected, *_) = tensors_of(function(**arguments))
    for poison in POISONS:
        bad = poisoned(arguments, poison)
        for key, value in arguments.items():
            if key.endswith("token_ids"):
                bad[key] = value
        (found, *_) = tensors_of(function(**bad))
        for token in itertools.product(range(2), range(3)):
            assert token == (1, 0) or same_bits(found[token], expected[token])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("kl_penalty", {"mask": torch.full((2, 3), NAN)}),
        ("kl_penalty", {"normalizer": torch.tensor(0.0), "reduction": "token-mean"}),
        ("kl_divergence", {"token_ids": torch.full((2, 3), 11)}),
        ("rollout_correction", {"cap": -1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_compiled_calls_refuse_alike(name, bad):
    torch._dynamo.reset()
    function, arguments = given(name)
    compiled = torch.compile(function, backend="aot_eager")
    argument = next(iter(bad))
    with pytest.raises((TypeError, ValueError, RuntimeError), match=argument):
        compiled(**{**arguments, **bad})


# inplace_backward beside other uses of the logits

IDS = torch.tensor([[0, 4, 6], [1, 1, 3]])


def plain(logits, **options):
    return klfast.token_logprobs(logits, IDS.to(logits.device), **options)


USES = {
    "none": lambda z, f: f(z).sum(),
    "square": lambda z, f: (z * z).sum() + f(z).sum(),
    "square-after": lambda z, f: f(z).sum() + (z * z).sum(),
    "log-softmax": lambda z, f: f(z).sum() + z.log_softmax(-1)[..., 0].sum(),
    "view": lambda z, f: f(z.view(2, 3, 7)).sum() + z.square().sum(),
    "klfast": lambda z, f: plain(z).sum() + f(z).sum(),
    "entropy": lambda z, f: sum(part.sum() for part in f(z, return_entropy=True)),
    "divergence": lambda z, f: f(z).sum() + klfast.kl_divergence(z, z.detach().sin()).sum(),
    "twice": lambda z, f: f(z).sum() + f(z).sum(),
    "copy-and-square": lambda z, f: f(Passed.apply(z)).sum() + z.square().sum(),
    "checkpoint": lambda z, f: checkpoint(f, z, use_reentrant=False).sum() + z.sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_gradient_in_the_logits_memory_is_right_or_an_error(backend, use):
    def inplace(logits, **options):
        return plain(logits, inplace_backward=True, backend=backend, **options)

    leaf = torch.randn(2, 3, 7).requires_grad_()
    before = leaf.detach().clone()
    (expected,) = torch.autograd.grad(use(leaf * 1, plain), leaf)
    message = "nothing"
    try:
        (found,) = torch.autograd.grad(use(leaf * 1, inplace), leaf)
    except (RuntimeError, ValueError) as error:
        message = str(error)
    if message == "nothing":
        torch.testing.assert_close(found, expected)
    else:
        assert "inplace" in message or "modified" in message
    assert same_bits(leaf.detach(), before)


# Sizes. A tensor that exceeds the memory is one expanded row.


def test_a_million_sequences_and_ten_million_empty_ones():
    count = 1_000_000
    a, b = torch.full((count,), -1.0, requires_grad=True), torch.full((count,), -1.5)
    options = {"estimator": "k1", "cu_seqlens": torch.arange(count + 1, dtype=torch.int32)}
    assert (klfast.kl_penalty(a, b, reduction="seq-sum", **options) == 0.5).all()
    mean = klfast.kl_penalty(a, b, reduction="seq-mean-token-sum", **options)
    (grad,) = torch.autograd.grad(mean, a)
    assert mean.item() == pytest.approx(0.5, rel=1e-6)
    assert grad.sum(dtype=torch.float64).item() == pytest.approx(1.0, rel=1e-5)
    edges = torch.zeros(10 * count + 1, dtype=torch.int64)
    edges[5 * count :] = 3
    a = torch.tensor([-1.0, -2.0, -3.0])
    options = {"estimator": "k1", "cu_seqlens": edges}
    sums = klfast.kl_penalty(a, torch.zeros(3), reduction="seq-sum", **options)
    assert sums.nonzero().tolist() == [[5 * count - 1]]
    assert sums[5 * count - 1] == -6


@pytest.mark.exhaustive
@pytest.mark.long
def test_more_than_2_to_the_31_logits():
    """The last rows lie beyond the range of int32."""
    words, kept = 32_000, 3
    rows = 2**31 // words + 5
    z, r = torch.randn(words), torch.randn(words)
    many, other = (t.expand(1, rows, words) for t in (z, r))
    mask = torch.zeros(1, rows, dtype=torch.bool)
    mask[0, -kept:] = True
    one = klfast.kl_divergence(z[None, None], r[None, None])
    found = klfast.kl_divergence(many, other, mask, reduction="seq-sum")
    assert found.item() == pytest.approx(kept * one.item(), rel=1e-5)
    found = klfast.token_logprobs(many, torch.full((1, rows), 7), mask)
    assert same_bits(found[0, -kept:], klfast.token_logprobs(z[None], torch.tensor([7])).expand(3))
    assert not found[0, :-kept].any()
