"""Incoming gradients of masked rows do not count. Other tests poison masked logits and ids."""

import agreement_logits as al
import pytest
import torch
from agreement import same_bits
from masked import POISON

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")

every_poison = pytest.mark.parametrize("poison", POISON.values(), ids=POISON)


def gradients(outputs, models, sent):
    return torch.autograd.grad(outputs, models, sent, retain_graph=True)


@pytest.mark.grid
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "seq-mean", "token-mean"])
@every_poison
@al.every_direction
def test_an_upstream_gradient_of_what_is_masked_does_not_count(
    backend, direction, poison, reduction
):
    """A loss that divides by the length of an empty sequence sends NaN to that sequence. A loss
    that overflows in fp16 sends infinity to all tokens.
    """
    logits, ref_logits = al.random_logits(3, 5, 37)
    keep = torch.rand(3, 5) < 0.6
    keep[1], keep[0, 0] = False, True
    models, ids = al.leaves(logits, ref_logits), al.random_ids(logits)
    options = {"direction": direction, "reduction": reduction, "backend": backend}
    calls = [
        klfast.kl_divergence(*models, keep, token_ids=ids, **options),
        (klfast.kl_divergence(*models, keep, **options),),
        klfast.token_logprobs(models[0], ids, keep, return_entropy=True, backend=backend),
    ]
    for found in calls:
        outputs = [t for t in al.tensors_of(found) if t.requires_grad]
        own = models[: 1 if found is calls[2] else 2]
        clean = [torch.randn_like(t) for t in outputs]
        masked = [{2: ~keep, 1: ~keep.any(1), 0: torch.tensor(False)}[t.dim()] for t in outputs]
        dirty = [torch.where(m, poison, sent) for m, sent in zip(masked, clean, strict=True)]
        pairs = zip(gradients(outputs, own, clean), gradients(outputs, own, dirty), strict=True)
        # Scaling the gradient of a scalar, and computing it anew, may round differently.
        assert all(same_bits(a, b) for a, b in pairs) or not any(m.any() for m in masked)
        everywhere = [torch.full_like(t, poison) for t in outputs]
        assert all((grad[~keep] == 0).all() for grad in gradients(outputs, own, everywhere))


def test_ignored_ids_are_not_confused_with_narrow_ones(backend):
    logits = torch.randn(2, 200)
    ids = torch.tensor([156, 3], dtype=torch.uint8)  # 156 is -100 in eight bits
    found = klfast.token_logprobs(logits, ids, ignore_index=-100, backend=backend)
    assert found.ne(0).all()
