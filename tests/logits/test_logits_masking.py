"""A masked row does not exist: what its logits and its token hold reaches nothing."""

import math

import pytest
import torch
from agreement import same_bits
from agreement_logits import DIRECTIONS, leaves, random_ids, random_logits, tensors_of
from masked import MASK_DTYPES, POISON

import klfast
from klfast.types.reduction import REDUCTIONS

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = 37

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_poison = pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def inputs():
    """(logits, ref_logits, token ids, keep) with a fully masked second sequence."""
    logits, ref_logits = random_logits(3, 5, WORDS)
    keep = torch.rand(3, 5) < 0.6
    keep[1] = False
    keep[0, 0] = True
    return logits, ref_logits, random_ids(logits), keep


def poisoned(logits, ref_logits, ids, keep, poison):
    rows = keep[..., None]
    absurd = torch.where(keep, ids, torch.tensor([-(2**62), -1, WORDS, 2**40, -100]))
    return torch.where(rows, logits, poison), torch.where(rows, ref_logits, poison), absurd


def everything(backend, logits, ref_logits, ids, mask, direction, reduction, grad_out=1.0):
    """Results, statistics and gradients with token ids, and without by one read."""
    found = []
    options = {"direction": direction, "reduction": reduction, "backend": backend}
    models = leaves(logits, ref_logits)
    for token_ids in (ids, None):
        outputs = klfast.kl_divergence(
            *models, mask, token_ids=token_ids, return_stats=True, **options
        )
        results = tensors_of(outputs)
        found += [*results, *outputs.stats]
        for result in results:
            upstream = torch.full_like(result, grad_out)
            found += torch.autograd.grad(
                result, models, upstream, retain_graph=True, materialize_grads=True
            )
    return [t.detach() for t in found]


def is_gradient(t):
    return t.dim() == 3


@pytest.mark.grid
@every_reduction
@every_direction
def test_poison_under_the_mask_changes_no_bit(backend, direction, reduction):
    """Neither of results, nor of gradients, nor of statistics; and the gradient there is 0."""
    logits, ref_logits, ids, keep = inputs()
    options = (keep, direction, reduction)
    clean = everything(backend, logits, ref_logits, ids, *options)
    for poison in POISON.values():
        dirty = everything(backend, *poisoned(logits, ref_logits, ids, keep, poison), *options)
        assert all(same_bits(a, b) for a, b in zip(clean, dirty, strict=True))
        gradients = [t for t in dirty if is_gradient(t)]
        assert len(gradients) == 8
        assert all((grad[~keep] == 0).all() for grad in gradients)
        assert sum(bool((grad[keep] != 0).any()) for grad in gradients) == 6  # two: the other's
        if reduction == "none":
            assert (dirty[0][~keep] == 0).all()


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_a_zero_of_any_dtype_masks(backend, dtype):
    logits, ref_logits, ids, keep = inputs()
    clean = everything(backend, logits, ref_logits, ids, keep, "reverse", "seq-mean")
    dirty = poisoned(logits, ref_logits, ids, keep, math.nan)
    by_dtype = everything(backend, *dirty, keep.to(dtype), "reverse", "seq-mean")
    assert all(same_bits(a, b) for a, b in zip(clean, by_dtype, strict=True))


def test_a_negative_zero_masks(backend):
    logits, ref_logits, ids, keep = inputs()
    dirty = poisoned(logits, ref_logits, ids, keep, math.nan)
    mask = torch.where(keep, 1.0, -0.0)
    found = everything(backend, *dirty, mask, "jsd", "token-mean")
    clean = everything(backend, logits, ref_logits, ids, keep, "jsd", "token-mean")
    assert all(same_bits(a, b) for a, b in zip(clean, found, strict=True))


@every_direction
def test_a_weight_scales_its_token(backend, direction):
    """Its divergence and gradient, not its log-probs; a mask may be of any layout."""
    logits, ref_logits, ids, keep = inputs()
    weight = torch.where(keep, 0.25, 0.0)
    plain = everything(backend, logits, ref_logits, ids, keep, direction, "none")
    for mask in (weight, weight.t().contiguous().t(), torch.stack([weight] * 2, -1)[..., 0]):
        found = everything(backend, logits, ref_logits, ids, mask, direction, "none")
        assert same_bits(found[0], plain[0] / 4)
        assert all(same_bits(a, b) for a, b in zip(found[1:3], plain[1:3], strict=True))
        weighed = [t for t in found if is_gradient(t)]
        own = [t for t in plain if is_gradient(t)]
        assert all(same_bits(a, b / 4) for a, b in zip(weighed[:2], own[:2], strict=True))
        assert all(same_bits(a, b) for a, b in zip(weighed[2:6], own[2:6], strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
@every_direction
def test_masked_gradients_are_0_under_any_upstream_gradient(backend, direction, reduction):
    """Of an overflowed fp16 loss, for example."""
    logits, ref_logits, ids, keep = inputs()
    for poison in POISON.values():
        found = everything(
            backend, logits, ref_logits, ids, keep, direction, reduction, grad_out=poison
        )
        assert all((t[~keep] == 0).all() for t in found if is_gradient(t))


@pytest.mark.grid
@every_poison
@every_direction
def test_an_upstream_gradient_under_the_mask_does_not_count(backend, direction, poison):
    logits, ref_logits, ids, keep = inputs()
    models = leaves(logits, ref_logits)
    outputs = tensors_of(
        klfast.kl_divergence(*models, keep, direction=direction, token_ids=ids, backend=backend)
    )
    clean_out = [torch.randn(3, 5) for _ in outputs]
    dirty_out = [torch.where(keep, out, poison) for out in clean_out]
    clean = torch.autograd.grad(outputs, models, clean_out, retain_graph=True)
    dirty = torch.autograd.grad(outputs, models, dirty_out)
    assert all(same_bits(a, b) for a, b in zip(clean, dirty, strict=True))

    leaf = logits.requires_grad_()
    outputs = klfast.token_logprobs(leaf, ids, mask=keep, return_entropy=True, backend=backend)
    clean = torch.autograd.grad(outputs, leaf, clean_out[:2], retain_graph=True)
    dirty = torch.autograd.grad(outputs, leaf, dirty_out[:2])
    assert same_bits(clean[0], dirty[0])


@pytest.mark.parametrize("reduction", ["seq-sum", "seq-mean"])
@every_direction
def test_an_upstream_gradient_of_an_empty_sequence_does_not_count(backend, direction, reduction):
    """A loss that divides by the length of an empty sequence sends back NaN for it alone."""
    logits, ref_logits, _, keep = inputs()
    models = leaves(logits, ref_logits)
    result = klfast.kl_divergence(
        *models, keep, direction=direction, reduction=reduction, backend=backend
    )
    grad_out = torch.randn(3)
    clean = torch.autograd.grad(result, models, grad_out, retain_graph=True)
    for poison in POISON.values():
        grad_out[1] = poison
        dirty = torch.autograd.grad(result, models, grad_out, retain_graph=True)
        assert all((a == b).all() for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_lowest_number_of_a_dtype_stands_for_no_word(backend, direction, temperature):
    """As many fill them in: no gradient, and none that is NaN."""
    models = [t[0] for t in random_logits(1, 3, 40)]
    lowest = torch.finfo(torch.float32).min
    models[0][0, 7] = models[1][1, 9] = models[0][2, 3] = models[1][2, 3] = lowest
    inputs = leaves(*models)
    ids = torch.zeros(3, dtype=torch.int64)
    options = {"temperature": temperature, "backend": backend}
    found = klfast.kl_divergence(*inputs, direction=direction, **options)
    logprobs = klfast.token_logprobs(inputs[0], ids, **options)
    grads = torch.autograd.grad(found.clamp(max=1e30).sum() + logprobs.sum(), inputs)
    assert not found.isnan().any()
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][0, 7] == grads[0][2, 3] == grads[1][2, 3] == 0


def test_ignored_ids_are_not_confused_with_narrow_ones(backend):
    logits = torch.randn(2, 200)
    ids = torch.tensor([156, 3], dtype=torch.uint8)  # 156 is -100 in eight bits
    found = klfast.token_logprobs(logits, ids, ignore_index=-100, backend=backend)
    assert found.ne(0).all()
