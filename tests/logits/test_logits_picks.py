"""token_logprobs of K ids a token: against the oracle, and in every way that one id is taken."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import (
    COMPILED,
    FAST,
    FLOATS,
    NOT_EMULATED,
    assert_tokens_agree,
    leaves,
    random_logits,
    uneven,
)
from torch.func import grad_and_value, vmap

import klfast
from klfast.args.logits import NO_ID

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Torch's own, under torch.compile: see test_compile.
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

compiled_backends = pytest.mark.parametrize("backend", COMPILED, indirect=True)
SHAPES = {"one-token": (), "tokens": (3,), "batch": (2, 3), "more": (2, 1, 3)}


def distinct_ids(logits, count):
    """[..., K] words in no order, no two alike."""
    return torch.rand(logits.shape).argsort(-1)[..., :count]


def any_ids(logits, count):
    """[..., K] words, some of them twice."""
    return torch.randint(logits.shape[-1], (*logits.shape[:-1], count))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("make", [distinct_ids, any_ids])
def test_any_shape_and_dtype(backend, make, shape, dtype):
    logits, _ = random_logits(*shape, 37, dtype=dtype)
    assert_tokens_agree(backend, logits, make(logits, 5))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 33, 64, 65, 200])
@pytest.mark.parametrize("words", [3, 201, 2500])
def test_any_number_of_ids(backend, words, count, dtype):
    """More than a warp has lanes, than a block has threads, than there are words."""
    logits, _ = random_logits(2, words, dtype=dtype)
    assert_tokens_agree(backend, logits, any_ids(logits, count), temperature=0.7)


@pytest.mark.parametrize("backend", FAST, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_vocabulary_of_a_model(backend, dtype):
    logits, _ = random_logits(3, 50_257, dtype=dtype)
    ids = torch.cat([logits.topk(20).indices, any_ids(logits, 44)], -1)
    assert_tokens_agree(backend, logits, ids, temperature=torch.tensor([0.5, 1.0, 2.0]))


@compiled_backends
def test_one_of_one_is_the_only_one(backend):
    """[..., 1] has the bits of [...]."""
    logits = random_logits(2, 3, 37)[0].requires_grad_()
    ids = any_ids(logits, 1)
    results = []
    for own in (ids, ids[..., 0]):
        found = klfast.token_logprobs(logits, own, return_entropy=True, backend=backend)
        loss = (uneven(found.entropy) * (found.logprobs.view(2, 3) + found.entropy)).sum()
        results.append(
            (found.logprobs.view(2, 3), found.entropy, *torch.autograd.grad(loss, logits))
        )
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_gradients_of_a_repeated_id_are_summed(backend):
    (logits,) = leaves(random_logits(2, 3, 37)[0])
    ids = torch.tensor([4, 9, 4, 4, 0]).expand(2, 3, 5)
    shares = torch.randn(2, 3, 5)
    summed = torch.stack([shares[..., [0, 2, 3]].sum(-1), shares[..., 1], shares[..., 4]], -1)
    grads = []
    for own, upstream in ((ids, shares), (ids[..., [0, 1, 4]], summed)):
        found = klfast.token_logprobs(logits, own, backend=backend)
        grads += torch.autograd.grad(found, logits, upstream)
    torch.testing.assert_close(*grads, rtol=2e-6, atol=2e-6)


@pytest.mark.grid
@pytest.mark.parametrize("ignore_index", [-100, 0, 36, 2**40, NO_ID])
@pytest.mark.parametrize("with_mask", [False, True])
def test_ignored_entries_do_not_exist(backend, with_mask, ignore_index):
    """Their log-prob is 0 and has no gradient; a token of none is not read."""
    logits, _ = random_logits(3, 4, 37)
    ids = any_ids(logits, 6)
    ids[torch.rand(3, 4, 6) < 0.4] = ignore_index
    ids[1, 2] = ignore_index
    exist = ids != ignore_index
    options = {"ignore_index": ignore_index}
    if with_mask:
        options["mask"] = torch.rand(3, 4) < 0.6
        exist &= options["mask"][..., None]
    logits[~exist.any(-1)] = torch.nan
    assert_tokens_agree(backend, logits, ids, exist, **options)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.bfloat16], ids=str)
def test_masked_tokens_do_not_exist(backend, mask_dtype):
    logits, _ = random_logits(3, 4, 37)
    ids, keep = any_ids(logits, 3), torch.rand(3, 4) < 0.6
    logits[~keep] = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(13)[:37]
    ids[~keep] = torch.tensor([-100, 10**12, NO_ID])
    exist = keep[..., None].expand(ids.shape)
    assert_tokens_agree(backend, logits, ids, exist, mask=keep.to(mask_dtype))


def test_words_that_are_excluded(backend):
    """A log-prob of -inf, which takes nothing from the others'; one of all is certain."""
    logits, _ = random_logits(3, 37)
    logits[0, ::2] = -torch.inf
    logits[1, 1:] = -torch.inf
    ids = torch.tensor([[0, 1, 2, 3], [3, 0, 2, 0], [0, 1, 2, 3]])
    leaf = logits.requires_grad_()
    found = klfast.token_logprobs(leaf, ids, backend=backend)
    expected = logits.detach().double().log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=4e-7)
    (gradient,) = torch.autograd.grad(found[torch.isfinite(found)].sum(), leaf)
    assert gradient.isfinite().all()
    assert not gradient[0, 4::2].any()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("count", [1, 4])
def test_empty_batches(backend, shape, count):
    (logits,) = leaves(torch.zeros(*shape, 5))
    ids = torch.zeros(*shape, count, dtype=torch.int64)
    for options in ({}, {"mask": torch.zeros(shape)}, {"ignore_index": 0}):
        found = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend, **options)
        assert found.logprobs.shape == ids.shape
        assert found.entropy.shape == shape
        (gradient,) = torch.autograd.grad([t.sum() for t in found], logits)
        assert torch.equal(gradient, torch.zeros(*shape, 5))


def test_no_id_at_all(backend):
    """K = 0 leaves the entropies."""
    (logits,) = leaves(random_logits(2, 3, 37)[0])
    results = []
    for ids in (torch.zeros(2, 3, 0, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)):
        found = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
        assert found.logprobs.shape == ids.shape
        upstream = uneven(found.entropy)
        results.append((found.entropy, *torch.autograd.grad(found.entropy, logits, upstream)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_ids_and_logits_of_any_layout(backend, dtype):
    logits, _ = random_logits(4, 3, 74)
    strided = logits[..., ::2].transpose(0, 1)
    ids = any_ids(strided, 5)
    expected = klfast.token_logprobs(strided.contiguous(), ids, backend=backend)
    for own in (ids.to(dtype), ids.to(dtype).transpose(0, 2).contiguous().transpose(0, 2)):
        assert_tokens_agree(backend, strided, own)
        found = klfast.token_logprobs(strided, own, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    shared = ids[:1].expand(ids.shape)
    assert_tokens_agree(backend, strided, shared)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_gradient_in_the_memory_of_the_logits(backend, dtype):
    (leaf,) = leaves(random_logits(2, 3, 37, dtype=dtype)[0])
    ids = any_ids(leaf, 5)
    ids[0, 1, ::2] = -100
    options = {"ignore_index": -100, "backend": backend, "return_entropy": True}
    grads, logits = [], leaf * 1
    for found in (
        klfast.token_logprobs(leaf, ids, **options),
        klfast.token_logprobs(logits, ids, inplace_backward=True, **options),
    ):
        upstream = [uneven(t) for t in found]
        grads.append(torch.autograd.grad(found, leaf, upstream)[0])
    assert same_bits(*grads)


@compiled_backends
@pytest.mark.parametrize("entropy", [False, True])
def test_bits_do_not_depend_on_what_is_beside(backend, entropy):
    """Nor on memory, batch and the other tokens."""
    logits, _ = random_logits(3, 4, 1500)
    ids = any_ids(logits, 7)

    def bits(x, own):
        (x,) = leaves(x)
        found = klfast.token_logprobs(x, own, return_entropy=True, backend=backend)
        loss = found.logprobs.sum() + (found.entropy.sum() if entropy else 0)
        return *found, *torch.autograd.grad(loss, x)

    whole = bits(logits, ids)
    for found, expected in zip(bits(logits[1:2], ids[1:2]), whole, strict=True):
        assert same_bits(found, expected[1:2])
    flat = bits(logits.flatten(0, 1), ids.flatten(0, 1))
    assert all(same_bits(a.flatten(), b.flatten()) for a, b in zip(flat, whole, strict=True))


@pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)
def test_compiled(backend):
    torch._dynamo.reset()
    ids = torch.randint(37, (2, 3, 5))
    ids[1, 1] = -100

    def loss(logits, temperature):
        options = {"temperature": temperature, "ignore_index": -100, "backend": backend}
        found = klfast.token_logprobs(logits, ids, return_entropy=True, **options)
        return (uneven(ids.float()) * found.logprobs).sum() + found.entropy.sum()

    function = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (logits,) = leaves(random_logits(2, 3, 37)[0])
    results = []
    for of in (function, loss):
        value = of(logits, torch.tensor([0.5, 2.0]))
        results.append((value.detach(), *torch.autograd.grad(value, logits)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (3, 2)], ids=str)
def test_vmap_is_a_loop(backend, in_dims):
    batches = random_logits(4, 2, 3, 37)[0], torch.randint(37, (4, 2, 3, 5))
    given = [
        t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(batches, in_dims, strict=True)
    ]

    def loss(logits, ids):
        found = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
        return sum((uneven(t) * t).sum() for t in found), found

    def everything(logits, ids):
        (_, found), gradient = grad_and_value(loss, has_aux=True)(logits, ids)[::-1]
        return *found, gradient

    results = vmap(everything, in_dims)(*given)
    for i in range(4):
        own = (
            t if dim is None else t.select(dim, i) for t, dim in zip(given, in_dims, strict=True)
        )
        for batched, alone in zip(results, everything(*own), strict=True):
            torch.testing.assert_close(batched[i], alone, rtol=1e-5, atol=1e-6)
