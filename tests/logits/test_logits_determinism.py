"""A row's bits depend on its own logits alone."""

import agreement_logits as al
import pytest
import torch
from agreement import same_bits
from masked import MASKS

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")


@al.every_direction
@al.every_compiled
def test_neighbours_do_not_change_the_way_a_row_is_looked_at(backend, direction):
    """The neighbours are summed two or three times."""
    words = 2500
    ordinary = al.random_logits(1, 4, words, apart=0.1)
    strange = [t.clone() for t in ordinary]
    strange[0][0, 1, :1500] = -torch.inf
    strange[1][0, 2, -1] = 300.0
    strange[0][0, 3] = torch.nan
    ids = al.random_ids(ordinary[0])
    found = al.everything(backend, *strange, ids, direction)
    expected = al.everything(backend, *ordinary, ids, direction)
    al.assert_same([part[:, 0] for part in found], [part[:, 0] for part in expected])


SHAPES = {"one": (1, 1, 1), "odd": (3, 5, 67), "long": (1, 2, 3001), "none": (0, 5, 3)}


@pytest.mark.grid
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@al.every_direction
@al.every_compiled
def test_every_output_is_written(backend, direction, shape, mask):
    assert torch.empty(3).isnan().all()
    for dtype in (torch.float32, torch.bfloat16):
        logits, ref_logits = al.random_logits(*shape, dtype=dtype)
        ids, mask_of = al.random_ids(logits), mask(shape[:2])
        found = al.everything(backend, logits, ref_logits, ids, direction, mask_of)
        (leaf,) = al.leaves(logits)
        inplace = klfast.token_logprobs(
            leaf * 1, ids, mask=mask_of, inplace_backward=True, backend=backend
        )
        found += torch.autograd.grad(inplace.sum(), leaf)
        for reduction in ("seq-mean", "token-mean"):
            options = {"direction": direction, "reduction": reduction, "return_stats": True}
            results = klfast.kl_divergence(
                logits, ref_logits, mask_of, token_ids=ids, backend=backend, **options
            )
            found += [*al.tensors_of(results), *results.stats]
        assert not any(t.isnan().any() for t in found)


@pytest.mark.parametrize("backend", al.FAST, indirect=True)
def test_more_rows_than_a_16_bit_index_counts(backend):
    """Only the last of 65,537 rows is kept."""
    rows = 2**16 + 1
    logits = torch.full((1, rows, 2), torch.nan)
    logits[0, -1] = torch.tensor([0.0, 1.0])
    ref_logits = torch.zeros(1, 1, 2).expand(1, rows, 2)
    mask = torch.zeros(1, rows, dtype=torch.bool)
    mask[0, -1] = True
    ids = mask.long()
    one = klfast.kl_divergence(logits[:, -1:], ref_logits[:, -1:], backend=backend)
    options = {"token_ids": ids, "reduction": "token-sum", "backend": backend}
    found = klfast.kl_divergence(logits, ref_logits, mask, **options)
    assert found.kl == one.item()
    assert not found.logprobs[0, :-1].any()
    options["token_ids"] = ids[:, -1:]
    alone = klfast.kl_divergence(logits[:, -1:], ref_logits[:, -1:], **options)
    assert same_bits(found.logprobs[:, -1:], alone.logprobs)
