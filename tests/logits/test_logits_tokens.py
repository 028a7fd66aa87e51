"""token_logprobs against the oracle: log-probs and entropies of any shape, dtype and vocabulary."""

import numpy as np
import pytest
import torch
from agreement import same_bits
from agreement_logits import (
    FAST,
    FLOATS,
    OF_ONE_WORD,
    assert_tokens_agree,
    leaves,
    random_ids,
    random_logits,
    tensors_of,
)

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MASK_DTYPES = (torch.bool, *INTEGERS, *FLOATS)
SHAPES = {
    "one-token": (37,),
    "tokens": (5, 37),
    "batch": (2, 3, 37),
    "more": (2, 2, 3, 37),
    "one-word": (2, 3, 1),
}


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_any_shape_and_dtype(backend, shape, dtype):
    logits, _ = random_logits(*shape, dtype=dtype)
    assert_tokens_agree(backend, logits, random_ids(logits))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [1, 2, 3, 31, 64, 255, 1025, 4097])
def test_vocabularies_of_any_size(backend, words, dtype):
    logits, _ = random_logits(3, words, dtype=dtype)
    ids = torch.tensor([0, words // 2, words - 1])
    assert_tokens_agree(backend, logits, ids)


@pytest.mark.parametrize("backend", FAST, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [32_000, 50_257])
def test_the_vocabularies_of_models(backend, words, dtype):
    logits, _ = random_logits(3, words, dtype=dtype)
    assert_tokens_agree(backend, logits, torch.tensor([0, words // 2, words - 1]))


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1, 3, 10.0])
def test_temperatures(backend, temperature):
    for dtype in (torch.float32, torch.float64):
        logits, _ = random_logits(2, 3, 37, dtype=dtype)
        assert_tokens_agree(backend, logits, random_ids(logits), temperature=temperature)


def rows_that_mislead(words):
    """Where the first words say nothing of the others."""
    x = 2 * torch.randn(words)
    ramp = torch.arange(words) / words
    rows = [x + 1000, x - 1e4, torch.zeros(words), 1e4 * x.sign(), 30 * x]
    for height in (30.0, 60.0, 88.0, 104.0, 1000.0):
        rows += [height * ramp, -height * ramp, x.index_fill(0, torch.tensor(words - 1), height)]
    for end in (1, 64, 1024, words - 1):
        rows += [torch.cat([torch.full((end,), low), x[end:]]) for low in (-torch.inf, -90, -1e4)]
        rows += [torch.cat([x[:end] + 60, x[end:]])]
    return torch.stack(rows)


def test_rows_that_mislead(backend):
    logits = rows_that_mislead(2500)
    for ids in (logits.argmax(-1), logits.argmax(-1) - 1):
        assert_tokens_agree(backend, logits, ids % 2500)


def test_entropies_by_hand(backend):
    """Of a flat, a certain, and an even choice: up to the rounding of one exponential."""
    logits = torch.tensor(
        [[2.0, 2.0, 2.0, 2.0], [0.0, 300.0, 0.0, 0.0], [9.0, -600.0, 9.0, -600.0]]
    )
    ids = torch.tensor([3, 1, 0])
    found, entropy = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
    expected = torch.tensor([4.0, 1.0, 2.0]).log()
    torch.testing.assert_close(entropy, expected, rtol=2e-7, atol=OF_ONE_WORD)
    torch.testing.assert_close(found, -expected, rtol=2e-7, atol=OF_ONE_WORD)


def test_an_unlikely_token_is_as_unlikely_as_it_is(backend):
    """Not -inf, nor at the limit of some exp."""
    logits = torch.zeros(3, 50)
    logits[:, 7] = torch.tensor([-80.0, -150.0, -1e5])
    found = klfast.token_logprobs(logits, torch.full((3,), 7), backend=backend)
    expected = logits[:, 7].double() - torch.tensor(49.0).double().log()
    torch.testing.assert_close(found.double(), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.375, 0.7, 3.0])
def test_one_word_is_certain(backend, temperature):
    """However large its logit, and however its temperature rounds."""
    logits = torch.tensor([[0.5], [25.154], [-1000.3]], requires_grad=True)
    ids = torch.zeros(3, dtype=torch.int64)
    options = {"temperature": temperature, "backend": backend}
    outputs = klfast.token_logprobs(logits, ids, return_entropy=True, **options)
    divergence = klfast.kl_divergence(logits, logits * 2, token_ids=ids, **options)
    for found in (*outputs, *tensors_of(divergence)):
        torch.testing.assert_close(found, torch.zeros(3), rtol=0, atol=OF_ONE_WORD)
    (grad,) = torch.autograd.grad([found.sum() for found in outputs], logits)
    torch.testing.assert_close(grad, torch.zeros(3, 1), rtol=0, atol=4e-7)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_token_ids_of_any_dtype_and_layout(backend, dtype):
    logits, _ = random_logits(4, 3, 100)
    ids = random_ids(logits)
    expected = klfast.token_logprobs(logits, ids, backend=backend)
    narrow = ids.to(dtype)
    for laid_out in (
        narrow,
        narrow.t().contiguous().t(),
        torch.stack([narrow, narrow], -1)[..., 1],
    ):
        assert same_bits(klfast.token_logprobs(logits, laid_out, backend=backend), expected)
    same = ids[:1].expand(4, 3)
    expected = klfast.token_logprobs(logits, same.contiguous(), backend=backend)
    assert same_bits(klfast.token_logprobs(logits, same.to(dtype), backend=backend), expected)


@pytest.mark.parametrize("mask_dtype", MASK_DTYPES, ids=str)
def test_masked_tokens_do_not_exist(backend, mask_dtype):
    """Whatever their logits and ids are; a weight is as good as another, but 0."""
    logits, _ = random_logits(3, 4, 37)
    ids, keep = random_ids(logits), torch.rand(3, 4) < 0.6
    logits[~keep] = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(13)[:37]
    ids[~keep] = torch.tensor([-100, 10**12])[torch.randint(2, (int((~keep).sum()),))]
    weight = 3 if mask_dtype != torch.bool else 1
    assert_tokens_agree(backend, logits, ids, keep, mask=(keep * weight).to(mask_dtype))


@pytest.mark.parametrize("ignore_index", [-100, 0, 36, 2**40, np.int64(-100)])
def test_ignored_ids_do_not_exist(backend, ignore_index):
    logits, _ = random_logits(3, 4, 37)
    ids, mask = random_ids(logits), torch.rand(3, 4) < 0.8
    ids[torch.rand(3, 4) < 0.3] = ignore_index
    keep = ids != ignore_index
    logits[~keep] = torch.nan
    assert_tokens_agree(backend, logits, ids, keep, ignore_index=ignore_index)
    masked = torch.where(mask[..., None], logits, torch.inf)
    both = {"ignore_index": ignore_index, "mask": mask}
    assert_tokens_agree(backend, masked, ids, keep & mask, **both)


def test_a_fully_masked_batch_is_zero(backend):
    logits = torch.full((2, 3, 9), torch.nan, requires_grad=True)
    ids = torch.full((2, 3), -100)
    for options in ({"mask": torch.zeros(2, 3)}, {"ignore_index": -100}):
        outputs = klfast.token_logprobs(
            logits, ids, return_entropy=True, backend=backend, **options
        )
        assert all(torch.equal(found, torch.zeros(2, 3)) for found in outputs)
        (grad,) = torch.autograd.grad([found.sum() for found in outputs], logits)
        assert torch.equal(grad, torch.zeros(2, 3, 9))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (2, 0, 3)], ids=str)
def test_empty_batches(backend, shape):
    (logits,) = leaves(torch.zeros(*shape, 5))
    ids = torch.zeros(shape, dtype=torch.int64)
    for options in ({}, {"mask": torch.zeros(shape)}, {"ignore_index": 0}):
        outputs = klfast.token_logprobs(
            logits, ids, return_entropy=True, backend=backend, **options
        )
        assert all(torch.equal(found, torch.zeros(shape)) for found in outputs)
        (grad,) = torch.autograd.grad([found.sum() for found in outputs], logits)
        assert torch.equal(grad, torch.zeros(*shape, 5))


def test_asking_for_the_entropy_changes_no_log_prob(backend):
    logits, _ = random_logits(3, 4, 1500)
    ids = random_ids(logits)
    alone = klfast.token_logprobs(logits, ids, backend=backend)
    beside, _ = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
    assert same_bits(alone, beside)
    leaf = logits.requires_grad_()
    assert same_bits(klfast.token_logprobs(leaf, ids, backend=backend).detach(), alone)
