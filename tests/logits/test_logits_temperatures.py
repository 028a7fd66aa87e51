"""Temperatures in tensors: of all tokens, of a sequence, of a token, padded and packed."""

import re

import pytest
import torch
from agreement import same_bits
from agreement_logits import (
    COMPILED,
    DIRECTIONS,
    FLOATS,
    NOT_EMULATED,
    assert_divergence_agrees,
    assert_entropy_agrees,
    assert_tokens_agree,
    leaves,
    random_ids,
    random_logits,
    tensors_of,
)
from agreement_topk import TAILS, assert_topk_agrees
from torch._dynamo.testing import CompileCounterWithBackend

import klfast

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Torch's own, under torch.compile: see test_compile.
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

B, T, V = 2, 3, 37
PLACES = {"one": (), "sequence": (B,), "column": (B, 1), "row": (1, T), "token": (B, T)}
"""The shapes that a batch [B, T] takes."""
BAD = {"zero": 0.0, "negative": -0.5, "nan": torch.nan, "infinite": torch.inf, "tiny": 2.0**-130}

every_place = pytest.mark.parametrize("shape", PLACES.values(), ids=PLACES)
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
compiled_backends = pytest.mark.parametrize("backend", COMPILED, indirect=True)


def temperatures(shape, dtype=torch.float32):
    """Between 0.3 and 2.3, no two alike."""
    count = torch.Size(shape).numel()
    return (0.3 + 2 * torch.randperm(count) / count).reshape(shape).to(dtype)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_place
def test_log_probs(backend, shape, dtype):
    logits, _ = random_logits(B, T, V, dtype=dtype)
    assert_tokens_agree(backend, logits, random_ids(logits), temperature=temperatures(shape))


@pytest.mark.grid
@pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_place
@every_direction
def test_divergences(backend, direction, shape, dtype, reduction):
    """With their statistics; a scalar's gradient comes out of the forward's read."""
    models = random_logits(B, T, V, dtype=dtype)
    mask = torch.tensor([[1, 0, 2], [1, 1, 0]])
    options = {"direction": direction, "reduction": reduction, "temperature": temperatures(shape)}
    assert_divergence_agrees(backend, *models, mask, **options)


@pytest.mark.grid
@pytest.mark.parametrize("shape", [(5,), (1,), ()], ids=str)
@every_direction
def test_packed_tokens(backend, direction, shape):
    models = random_logits(5, V)
    edges = torch.tensor([0, 2, 2, 5])
    options = {"direction": direction, "reduction": "seq-mean-token-mean", "cu_seqlens": edges}
    assert_divergence_agrees(backend, *models, temperature=temperatures(shape), **options)
    assert_tokens_agree(backend, models[0], random_ids(models[0]), temperature=temperatures(shape))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_direction
def test_entropies_beside_divergences(backend, direction, dtype):
    models = random_logits(B, T, V, dtype=dtype)
    options = {"direction": direction, "temperature": temperatures((B, T))}
    assert_entropy_agrees(backend, *models, torch.tensor([[1, 0, 1], [1, 1, 0]]), **options)


@pytest.mark.parametrize("words", [1, 2500])
def test_vocabularies_of_several_tiles(backend, words):
    logits, ref_logits = random_logits(1, 3, words)
    options = {"temperature": temperatures((1, 3))}
    assert_tokens_agree(backend, logits, random_ids(logits), **options)
    for direction in DIRECTIONS:
        assert_divergence_agrees(backend, logits, ref_logits, direction=direction, **options)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8], ids=str)
def test_temperatures_of_any_dtype_and_layout(backend, dtype):
    """None rounds the temperature further than it is stored."""
    logits, _ = random_logits(B, T, V)
    ids = random_ids(logits)
    stored = (1 + torch.arange(B * T).reshape(B, T) / 2).to(dtype)
    expected = klfast.token_logprobs(logits, ids, temperature=stored.double(), backend=backend)
    strided = torch.stack([stored, stored], -1)[..., 1]
    for own in (stored, stored.t().contiguous().t(), strided):
        found = klfast.token_logprobs(logits, ids, temperature=own, backend=backend)
        assert same_bits(found, expected)


@compiled_backends
@every_place
@every_direction
def test_the_bits_are_those_of_a_number(backend, direction, shape):
    models = leaves(*random_logits(B, T, V))
    ids = random_ids(models[0])

    def bits(temperature):
        options = {"temperature": temperature, "backend": backend}
        each = tensors_of(
            klfast.kl_divergence(*models, direction=direction, token_ids=ids, **options)
        )
        mean = klfast.kl_divergence(*models, direction=direction, reduction="token-mean", **options)
        taken = klfast.token_logprobs(models[0], ids, return_entropy=True, **options)
        outputs = (*each, mean, *taken)
        grads = torch.autograd.grad([t.sum() for t in outputs], models, retain_graph=True)
        return *outputs, *grads, *torch.autograd.grad(mean, models)

    for found, expected in zip(
        bits(torch.full(shape, 0.7, dtype=torch.float64)), bits(0.7), strict=True
    ):
        assert same_bits(found, expected)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_temperature_of_a_masked_token_is_not_looked_at(backend, bad):
    logits, ref_logits = random_logits(B, T, V)
    ids, mask = random_ids(logits), torch.tensor([[1, 0, 1], [1, 1, 0]])
    temperature = temperatures((B, T))
    poisoned = torch.where(mask != 0, temperature, bad)
    assert_tokens_agree(backend, logits, ids, mask != 0, mask=mask, temperature=poisoned)
    for direction in DIRECTIONS:
        options = {"direction": direction, "reduction": "token-mean"}
        assert_divergence_agrees(backend, logits, ref_logits, mask, temperature=poisoned, **options)
    ref_logprobs, words = ref_logits.log_softmax(-1).topk(3)
    for tail in TAILS:
        options = {"tail": tail, "reduction": "token-mean", "temperature": poisoned}
        assert_topk_agrees(backend, logits, words, ref_logprobs, mask, **options)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)
def test_nor_from_hidden_states(backend, bad):
    hidden, head = torch.randn(2, B, T, 5), torch.randn(2, V, 5)
    ids, mask = torch.randint(V, (B, T)), torch.tensor([[1, 0, 1], [1, 1, 0]])
    temperature = temperatures((B, T))

    def bits(temperature):
        inputs = leaves(hidden[0], head[0], hidden[1], head[1])
        options = {"mask": mask, "temperature": temperature, "backend": backend}
        logprobs = klfast.linear_token_logprobs(*inputs[:2], ids, **options)
        kl = klfast.linear_kl_divergence(*inputs, reduction="token-mean", **options)
        return logprobs, kl, *torch.autograd.grad(logprobs.sum() + kl, inputs)

    poisoned = torch.where(mask != 0, temperature, bad)
    for found, expected in zip(bits(poisoned), bits(temperature), strict=True):
        assert same_bits(found, expected)


@pytest.mark.grid
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("shape", [(), (B, T)], ids=["one", "token"])
@pytest.mark.parametrize("call", ["token_logprobs", "kl_divergence", "topk_kl_divergence"])
def test_a_temperature_that_is_none_is_named_with_its_place(backend, call, shape, bad):
    logits, ref_logits = random_logits(B, T, V)
    temperature = temperatures(shape)
    temperature.view(-1)[-1] = bad
    place = "" if shape == () else " at token 5"
    text = rf"temperature must be > 0 with a reciprocal within fp32, got {bad:.6g}{place}$"
    others = {
        "token_logprobs": (random_ids(logits),),
        "kl_divergence": (ref_logits,),
        "topk_kl_divergence": ref_logits.log_softmax(-1).topk(2)[::-1],
    }[call]
    for grad in (False, True):
        with pytest.raises(ValueError, match=text):
            getattr(klfast, call)(
                logits.clone().requires_grad_(grad),
                *others,
                temperature=temperature,
                backend=backend,
            )


@pytest.mark.parametrize("shape", [(3,), (B, T, 1), (3, 1), (1, B), (B, T, V), (0,)], ids=str)
def test_shapes_that_are_not_the_tokens(shape):
    logits, ref_logits = random_logits(B, T, V)
    text = (
        r"temperature must be a number, a 0-dim tensor, or have the first dimensions of logits "
        rf"without the vocabulary, \[2, 3\], or 1 in their place, got {re.escape(str(list(shape)))}"
    )
    temperature = torch.ones(shape)
    with pytest.raises(ValueError, match=text):
        klfast.token_logprobs(logits, random_ids(logits), temperature=temperature)
    with pytest.raises(ValueError, match=text):
        klfast.kl_divergence(logits, ref_logits, temperature=temperature)


def test_types_and_devices_that_are_none():
    logits, ref_logits = random_logits(B, T, V)
    for temperature, error, text in (
        (torch.ones(B, dtype=torch.complex64), TypeError, "temperature must"),
        (torch.ones(B, dtype=torch.bool), TypeError, "temperature must"),
        (torch.ones(B, device="meta"), ValueError, "temperature must be on the device of logits"),
        ([1.0, 1.0], TypeError, "temperature must be a finite number > 0"),
        ("1", TypeError, "temperature must be a finite number > 0"),
    ):
        with pytest.raises(error, match=text):
            klfast.kl_divergence(logits, ref_logits, temperature=temperature)


def test_no_gradient_reaches_it(backend):
    logits, ref_logits = leaves(*random_logits(B, T, V))
    (temperature,) = leaves(temperatures((B, T)))
    for found in (
        klfast.token_logprobs(logits, random_ids(logits), temperature=temperature, backend=backend),
        klfast.kl_divergence(logits, ref_logits, temperature=temperature, backend=backend),
    ):
        (grad,) = torch.autograd.grad(found.sum(), temperature, allow_unused=True)
        assert grad is None


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)
@pytest.mark.parametrize("shape", [(B, 1), (B, T), (), (B,)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
def test_compiled(backend, reduction, shape):
    """New temperatures take no new compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    ids = torch.randint(V, (B, T))

    def loss(logits, ref_logits, temperature):
        options = {"temperature": temperature, "backend": backend}
        taken = klfast.token_logprobs(logits, ids, return_entropy=True, **options)
        kl = klfast.kl_divergence(logits, ref_logits, reduction=reduction, **options)
        return kl.sum() + taken.logprobs.sum() + 0.3 * taken.entropy.sum()

    function = torch.compile(loss, fullgraph=True, backend=counter)
    for _ in range(3):
        models, temperature = leaves(*random_logits(B, T, V)), temperatures(shape)
        results = []
        for of in (function, loss):
            value = of(*models, temperature)
            results.append((value.detach(), *torch.autograd.grad(value, models)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


@compiled_backends
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, 0), (0, 0, None)], ids=str)
def test_under_vmap(backend, in_dims):
    logits, ref_logits = random_logits(4, B, T, V)
    temperature = temperatures((4, B, T))
    models = [
        t if dim == 0 else t[0] for t, dim in zip((logits, ref_logits), in_dims, strict=False)
    ]
    own = temperature if in_dims[2] == 0 else temperature[0]
    ids = torch.randint(V, (B, T))

    def both(x, y, t):
        options = {"temperature": t, "backend": backend}
        return klfast.kl_divergence(x, y, **options), klfast.token_logprobs(x, ids, **options)

    def one(i, tensor, dim):
        return tensor[i] if dim == 0 else tensor

    found = torch.func.vmap(both, in_dims=in_dims)(*models, own)
    for i in range(4):
        given = [one(i, t, dim) for t, dim in zip((*models, own), in_dims, strict=True)]
        for batched, alone in zip(found, both(*given), strict=True):
            torch.testing.assert_close(batched[i], alone)
