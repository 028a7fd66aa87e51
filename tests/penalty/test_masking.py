"""Masked tokens do not exist. Kept ones that are not finite are counted, in their sequence only."""

import math

import pytest
import torch
from agreement import random_inputs, same_bits
from masked import POISON

import klfast
from klfast import Estimator
from klfast.args.estimator import ESTIMATORS
from klfast.types.reduction import REDUCTIONS

SHAPE = (4, 70)
RICH = Estimator("k3", importance_cap=1.2, log_ratio_clip=3.0, linear_tail=1.0, kl_clip=2.0)
FORMS = {name: Estimator(name) for name in ESTIMATORS} | {"rich": RICH}

every_poison = pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_form = pytest.mark.parametrize("estimator", FORMS.values(), ids=FORMS)


def inputs():
    """([logprobs, ref_logprobs, old_logprobs], keep) with a fully masked second sequence."""
    keep = torch.rand(SHAPE) < 0.6
    keep[1] = False
    return list(random_inputs(SHAPE)), keep


def everything(backend, tensors, mask, estimator, reduction, grad_out=None):
    """[result, gradients to logprobs and ref_logprobs, and all statistics] of a call."""
    logprobs, ref_logprobs = (t.detach().requires_grad_() for t in tensors[:2])
    result, stats = klfast.kl_penalty(
        logprobs,
        ref_logprobs,
        mask,
        estimator=estimator,
        reduction=reduction,
        old_logprobs=tensors[2] if estimator is RICH else None,
        return_stats=True,
        backend=backend,
    )
    upstream = torch.ones_like(result) if grad_out is None else grad_out
    grads = torch.autograd.grad(result, (logprobs, ref_logprobs), upstream)
    return [result.detach(), *grads, *stats]


@pytest.mark.parametrize("weight", [1.0, 0.5])  # masks of zeros and ones have kernels of their own
def test_a_negative_zero_masks(backend, weight):
    tensors, keep = inputs()
    mask = torch.where(keep, weight, -0.0)
    poisoned = [torch.where(keep, t, math.nan) for t in tensors]
    assert all(t.isfinite().all() for t in everything(backend, poisoned, mask, RICH, "token-mean"))


@pytest.mark.parametrize("kept", [1, 2, 128, 255])
def test_a_boolean_view_of_bytes_keeps_what_is_not_zero(backend, kept):
    """Masks from images or numpy hold 255. torch reads any such byte as True."""
    tensors, keep = inputs()
    view = (keep.to(torch.uint8) * kept).view(torch.bool)
    found, expected = (
        everything(backend, tensors, mask, RICH, "seq-mean") for mask in (view, keep)
    )
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_lazily_negated_tensors_are_negated(backend):
    negated = torch.randn(3, 70, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    zeros = torch.zeros(3, 70)
    found, expected = (
        everything(backend, [t, zeros], None, FORMS["k3"], "none")
        for t in (negated, negated.resolve_neg())
    )
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("reduction", ["none", "seq-sum", "seq-mean"])
@every_form
def test_an_upstream_gradient_under_the_mask_does_not_count(backend, estimator, reduction):
    """A loss that divides by the length of an empty sequence sends NaN back for that sequence."""
    tensors, keep = inputs()
    exists = keep if reduction == "none" else keep.any(-1)
    grad_out = torch.randn(exists.shape)
    clean = everything(backend, tensors, keep, estimator, reduction, grad_out)
    for poison in POISON.values():
        dirty_out = torch.where(exists, grad_out, poison)
        dirty = everything(backend, tensors, keep, estimator, reduction, dirty_out)
        assert all((a == b).all() for a, b in zip(clean, dirty, strict=True))


@pytest.mark.grid
@every_reduction
@every_form
def test_masked_gradients_are_0_under_any_upstream_gradient(backend, estimator, reduction):
    """An overflowed fp16 loss sends such gradients, for example."""
    tensors, keep = inputs()
    result = everything(backend, tensors, keep, estimator, reduction)[0]
    for poison in POISON.values():
        grad_out = torch.full_like(result, poison)
        grads = everything(backend, tensors, keep, estimator, reduction, grad_out)[1:3]
        assert all((grad[~keep] == 0).all() for grad in grads)


@pytest.mark.grid
@pytest.mark.parametrize("clip", [(100, 200), (-200, -100)], ids=str)
@every_reduction
def test_clips_that_exclude_0_leave_masked_tokens_0(backend, reduction, clip):
    """At a masked token f of the clipped 0 may be infinite. It is not multiplied by 0."""
    logprobs = torch.tensor([[sum(clip) / 2, 0.0, 0.0]])
    mask = torch.tensor([[True, False, False]])
    options = {"reduction": reduction, "backend": backend}
    for name in ESTIMATORS:
        estimator = Estimator(name, log_ratio_clip=clip)
        one, padded = (
            klfast.kl_penalty(t, torch.zeros_like(t), keep, estimator=estimator, **options)
            for t, keep in ((logprobs[:, :1], mask[:, :1]), (logprobs, mask))
        )
        assert torch.equal(padded.flatten()[:1], one.flatten()), name
        assert (padded.flatten()[1:] == 0).all()


@every_poison
@pytest.mark.parametrize("side", [0, 1], ids=["logprobs", "ref_logprobs"])
def test_what_is_not_finite_on_kept_tokens_is_counted(backend, side, poison):
    tensors, keep = inputs()
    tensors[side][2, :3] = poison
    keep[2, :3] = torch.tensor([True, False, True])
    stats = everything(backend, tensors, keep, Estimator("k1"), "none")[3:]
    stats = klfast.KLStats(*stats)
    assert stats.nonfinite.tolist() == [0, 0, 2, 0]
    largest = stats.max_abs_log_ratio
    assert largest[[0, 1, 3]].isfinite().all()
    assert largest[2].isnan() if math.isnan(poison) else largest[2] == math.inf


@pytest.mark.parametrize(
    ("name", "sign"), [("k3", -1), ("k3_ref", 1), ("r_log_r", 1)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "weighted"])
def test_a_value_that_overflows_on_a_kept_token_is_counted(backend, name, sign, masked):
    """The log-ratio is finite and beyond exp's range. Limits keep the value finite."""
    policy, ref = torch.full((2, 300), -1.0), torch.full((2, 300), -1.1)
    (policy if sign < 0 else ref)[0, [3, 290]] = -121.0
    mask = torch.ones(2, 300) if masked else None
    for options, counted in (({}, 2), ({"log_ratio_clip": 20}, 0), ({"linear_tail": 5.0}, 0)):
        estimator = Estimator(name, **options)
        _, stats = klfast.kl_penalty(
            policy, ref, mask, estimator=estimator, return_stats=True, backend=backend
        )
        assert stats.nonfinite.tolist() == [counted, 0]
        assert stats.kl.isfinite().tolist() == [counted == 0, True]


@pytest.mark.grid
@every_poison
@every_form
def test_what_is_not_finite_stays_in_its_sequence(backend, estimator, poison):
    tensors, keep = inputs()
    keep[2, 5] = True
    clean = everything(backend, tensors, keep, estimator, "seq-sum")
    tensors[0][2, 5] = poison
    dirty = everything(backend, tensors, keep, estimator, "seq-sum")
    others = [0, 1, 3]
    assert all(same_bits(a[others], b[others]) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nan_on_a_kept_token_is_not_hidden(backend, name):
    """A clip does not hide it either: with a penalty of 10 instead of NaN, training would go on."""
    for estimator in (Estimator(name), Estimator(name, log_ratio_clip=20, kl_clip=10)):
        value = klfast.kl_penalty(
            torch.tensor([math.nan, 1.0]), torch.zeros(2), estimator=estimator, backend=backend
        )
        assert value[0].isnan()
        assert value[1].isfinite()
