"""token_logprobs of K ids per token."""

import agreement_logits as al
import pytest
import torch

import klfast
from klfast.args.logits import NO_ID

pytestmark = pytest.mark.usefixtures("one_thread")


def any_ids(logits, count):
    """[..., K] token ids, which may repeat."""
    return torch.randint(logits.shape[-1], (*logits.shape[:-1], count))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 33, 64, 65, 200])
@pytest.mark.parametrize("words", [3, 201, 2500])
def test_any_number_of_ids(backend, words, count, dtype):
    """K may exceed the lanes of a warp, the threads of a block and the vocabulary."""
    logits, _ = al.random_logits(2, words, dtype=dtype)
    al.assert_tokens_agree(backend, logits, any_ids(logits, count), temperature=0.7)


def test_gradients_of_a_repeated_id_are_summed(backend):
    (logits,) = al.leaves(al.random_logits(2, 3, 37)[0])
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
    """Their log-prob is 0 and has no gradient. A token without ids is not read."""
    logits, _ = al.random_logits(3, 4, 37)
    ids = any_ids(logits, 6)
    ids[torch.rand(3, 4, 6) < 0.4] = ignore_index
    ids[1, 2] = ignore_index
    exist = ids != ignore_index
    options = {"ignore_index": ignore_index}
    if with_mask:
        options["mask"] = torch.rand(3, 4) < 0.6
        exist &= options["mask"][..., None]
    logits[~exist.any(-1)] = torch.nan
    al.assert_tokens_agree(backend, logits, ids, exist, **options)


def test_words_that_are_excluded(backend):
    """An excluded id has the log-prob -inf. The only remaining id is certain."""
    logits, _ = al.random_logits(3, 37)
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


def test_no_id_at_all(backend):
    """K = 0 leaves the entropies."""
    (logits,) = al.leaves(al.random_logits(2, 3, 37)[0])
    results = []
    for ids in (torch.zeros(2, 3, 0, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)):
        found = klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend)
        assert found.logprobs.shape == ids.shape
        upstream = al.uneven(found.entropy)
        results.append((found.entropy, *torch.autograd.grad(found.entropy, logits, upstream)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
