"""topk_kl_divergence under torch.compile, torch.func, autocast and a second backward."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import COMPILED, DIRECTIONS, NOT_EMULATED, leaves
from agreement_topk import TAILS, random_teacher
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad_and_value, vmap

import klfast

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Torch's own, under torch.compile: see test_compile.
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

MASK = torch.tensor([[1.0, 0.0, 0.5], [1.0, 1.0, 0.0]])
COMPILES = {
    "per-token": {},
    "scalar": {"reduction": "token-mean", "mask": MASK, "coef": 0.3, "normalizer": 7.0},
    "statistics": {"reduction": "seq-mean", "return_stats": True, "tail": "generalized"},
    "renormalize": {"tail": "renormalize", "temperature": torch.rand(2, 1) + 0.5, "mask": MASK},
    "jsd": {"direction": "jsd", "jsd_beta": 0.3, "tail": "drop", "reduction": "token-sum"},
    "reverse": {"direction": "reverse", "temperature": 0.7, "reduction": "token-mean"},
}

not_emulated = pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)
compiled_backends = pytest.mark.parametrize("backend", COMPILED, indirect=True)
every_tail = pytest.mark.parametrize("tail", TAILS)


def teacher_with_holes(*shape):
    """Log-probs of which some are -inf, in one token all."""
    logits, ids, teacher = random_teacher(*shape)
    teacher.view(-1, 4)[1, ::2] = -torch.inf
    teacher.view(-1, 4)[3] = -torch.inf
    return logits, ids, teacher


def run(function, ids, *inputs):
    """Results and gradients to both."""
    found = function(inputs[0], ids, inputs[1])
    flat = [t for t in torch.utils._pytree.tree_leaves(found) if t is not None]
    outputs = [t for t in flat if t.requires_grad]
    grads = torch.autograd.grad([t.sum() for t in outputs], inputs)
    return [t.detach() for t in (*flat, *grads)]


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("options", COMPILES.values(), ids=COMPILES)
@not_emulated
def test_compiled(backend, options):
    torch._dynamo.reset()
    logits, ids, teacher = teacher_with_holes(2, 3, 37)

    def divergence(student, words, teacher):
        return klfast.topk_kl_divergence(student, words, teacher, backend=backend, **options)

    function = torch.compile(divergence, fullgraph=True, backend="aot_eager")
    inputs = leaves(logits, teacher)
    for found, expected in zip(
        run(function, ids, *inputs), run(divergence, ids, *inputs), strict=True
    ):
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_new_numbers_and_lengths_take_no_new_compilation():
    """The second number may teach dynamo that it changes."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def divergence(student, words, teacher, temperature, coef):
        return klfast.topk_kl_divergence(
            student,
            words,
            teacher,
            temperature=temperature,
            coef=coef,
            reduction="token-mean",
        )

    function = torch.compile(divergence, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (3, 4, 7, 11):
        given = (*random_teacher(2, tokens, 37), torch.rand(2, tokens) + 0.5, tokens / 10)
        torch.testing.assert_close(function(*given), divergence(*given))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@every_tail
def test_vmap_is_a_loop(backend, tail, reduction, in_dims):
    batches = teacher_with_holes(4, 2, 3, 37)
    given = [t[0] if dim is None else t for t, dim in zip(batches, in_dims, strict=True)]

    def loss(logits, ids, teacher):
        return klfast.topk_kl_divergence(
            logits, ids, teacher, MASK, tail=tail, reduction=reduction, backend=backend
        ).sum()

    everything = grad_and_value(loss, argnums=(0, 2))
    (grads, values), results = vmap(everything, in_dims)(*given), []
    for i in range(4):
        own = [t if dim is None else t[i] for t, dim in zip(given, in_dims, strict=True)]
        results.append(everything(*own))
    for i, (expected, value) in enumerate(results):
        torch.testing.assert_close(values[i], value, rtol=1e-5, atol=1e-6)
        for found, alone in zip(grads, expected, strict=True):
            torch.testing.assert_close(found[i], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@compiled_backends
def test_a_second_derivative_raises(backend, reduction):
    """To the student, through which it went; never silently 0."""
    logits, ids, teacher = random_teacher(2, 3, 37)
    inputs = leaves(logits, teacher)
    loss = klfast.topk_kl_divergence(
        inputs[0] * 1, ids, inputs[1] * 1, reduction=reduction, backend=backend
    ).sum()
    (grad,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiable once.*backend='reference'"):
        grad.square().sum().backward()


@pytest.mark.parametrize("direction", DIRECTIONS)
@every_tail
def test_the_reference_is_differentiable_twice(direction, tail):
    logits, ids, teacher = random_teacher(1, 2, 5, entries=3, dtype=torch.float64)
    inputs = leaves(logits, teacher.double())
    options = {"direction": direction, "tail": tail, "backend": "reference"}

    def divergence(student, teacher):
        return klfast.topk_kl_divergence(student, ids, teacher, **options)

    assert torch.autograd.gradcheck(divergence, inputs)
    assert torch.autograd.gradgradcheck(divergence, inputs)


def test_a_teacher_that_asks_for_nothing_gets_nothing(backend):
    logits, ids, teacher = random_teacher(2, 3, 37)
    for student, own in ((True, False), (False, True), (False, False)):
        given = logits.clone().requires_grad_(student), teacher.clone().requires_grad_(own)
        kl = klfast.topk_kl_divergence(given[0], ids, given[1], backend=backend)
        assert kl.requires_grad == (student or own)
        if kl.requires_grad:
            kl.sum().backward()
        assert [t.grad is not None for t in given] == [student, own]


def test_under_no_grad_and_inference_mode(backend):
    given = random_teacher(2, 3, 37)
    expected = klfast.topk_kl_divergence(*given, backend=backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inputs = tuple(t.clone() for t in given)
            found = klfast.topk_kl_divergence(*inputs, backend=backend)
            assert not found.requires_grad
            assert torch.equal(found, expected)


@compiled_backends
@every_tail
def test_bits_do_not_depend_on_batch_padding_and_threads(backend, tail, set_num_threads):
    logits, ids, teacher = random_teacher(3, 40, 300)
    options = {"tail": tail, "reduction": "seq-sum", "backend": backend}

    def bits(x, own, logprobs, mask=None, **layout):
        inputs = leaves(x, logprobs)
        kl = klfast.topk_kl_divergence(inputs[0], own, inputs[1], mask, **options, **layout)
        return kl, *torch.autograd.grad(kl.sum(), inputs)

    set_num_threads(1)
    whole = bits(logits, ids, teacher)
    set_num_threads(4)
    threaded = bits(logits, ids, teacher)
    alone = bits(logits[1:2], ids[1:2], teacher[1:2])
    flat = [t.flatten(0, 1) for t in (logits, ids, teacher)]
    packed = bits(*flat, cu_seqlens=torch.tensor([0, 40, 80, 120]))
    mask = torch.ones(3, 49, dtype=torch.bool)
    mask[:, 40:] = False
    wide = [torch.cat([t, t[:, :9]], 1) for t in (logits, ids, teacher)]
    padded = bits(*wide, mask)
    for i, expected in enumerate(whole):
        assert same_bits(threaded[i], expected)
        assert same_bits(alone[i], expected[1:2])
        assert same_bits(packed[i].view(expected.shape), expected)
        assert same_bits(padded[i][:, :40] if i else padded[i], expected)
