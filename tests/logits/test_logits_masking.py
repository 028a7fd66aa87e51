"""A masked row does not exist: what its logits and its token hold reaches nothing."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import DIRECTIONS, leaves, random_ids, random_logits, tensors_of
from masked import POISON

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = 37

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
every_poison = pytest.mark.parametrize("poison", POISON.values(), ids=POISON)


def inputs():
    """(logits, ref_logits, token ids, keep) with a fully masked second sequence."""
    logits, ref_logits = random_logits(3, 5, WORDS)
    keep = torch.rand(3, 5) < 0.6
    keep[1] = False
    keep[0, 0] = True
    return logits, ref_logits, random_ids(logits), keep


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


def test_ignored_ids_are_not_confused_with_narrow_ones(backend):
    logits = torch.randn(2, 200)
    ids = torch.tensor([156, 3], dtype=torch.uint8)  # 156 is -100 in eight bits
    found = klfast.token_logprobs(logits, ids, ignore_index=-100, backend=backend)
    assert found.ne(0).all()
