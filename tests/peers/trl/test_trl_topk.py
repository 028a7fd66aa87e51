"""klfast.compat.trl's losses over a few words against those of TRL's SDFT, SDPO and IW-OPD."""

import inspect
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from agreement_logits import assert_models_agree, differentiated, distinct_logits, leaves
from comparison import every_dtype
from trl.experimental.async_distillation import async_distillation_trainer
from trl.experimental.iw_opd import iw_opd_trainer
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
from trl.experimental.sdft import loss_utils as sdft
from trl.experimental.sdft import sdft_trainer
from trl.experimental.sdpo import loss_utils as sdpo
from trl.experimental.sdpo import sdpo_trainer
from trl.experimental.server_distillation import server_distillation_trainer as server

import klfast
from klfast.compat import trl

every_beta = pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
every_tail = pytest.mark.parametrize("tail", [False, True], ids=["renormalized", "tail"])
every_bucket = pytest.mark.parametrize(
    "bucket",
    [
        sdft.add_tail_bucket,
        sdpo.add_tail_bucket,
        *(
            lambda logprobs, of=of: of._add_tail_bucket(logprobs, torch.isfinite(logprobs))[0]
            for of in (iw_opd_trainer, server, async_distillation_trainer)
        ),
    ],
    ids=["sdft", "sdpo", "iw_opd", "server", "async"],
)
WITH_MASKS = (iw_opd_trainer, server, async_distillation_trainer)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *(
            (getattr(module, name), getattr(trl, name))
            for module in (sdft, sdpo)
            for name in ("add_tail_bucket", "compute_topk_self_distillation_loss")
        ),
        *((module._add_tail_bucket, trl.add_tail_bucket_and_mask) for module in WITH_MASKS),
        (IWOPDTrainer.generalized_jsd_loss, trl.iw_opd_generalized_jsd_loss),
    ],
)
def test_arguments_have_trl_s_names_order_and_defaults(theirs, ours):
    wanted, given = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (theirs, ours)
    )
    assert given[: len(wanted)] == wanted


@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("module", [sdft, sdpo], ids=["sdft", "sdpo"])
@every_tail
@every_dtype
@every_beta
def test_self_distillation(beta, dtype, tail, module, k):
    options = {
        "distillation_topk": k,
        "distillation_alpha": beta,
        "distillation_add_tail": tail,
    }
    ours, theirs = (
        partial(of.compute_topk_self_distillation_loss, **options) for of in (trl, module)
    )
    assert_models_agree(ours, theirs, *distinct_logits(2, 4, 300, dtype=dtype))


OPTIONS = {
    "batchmean": {},
    "sum": {"reduction": "sum"},
    "mean": {"reduction": "mean"},
    "number": {"num_items_in_batch": torch.tensor(11)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("labelled", [False, True], ids=["", "labels"])
@pytest.mark.parametrize("top_k", [0, 1, 20, 300])
@every_tail
@every_dtype
@every_beta
def test_iw_opd(beta, dtype, tail, top_k, labelled, options):
    labels = torch.tensor([[1, -100, 1, 1], [-100, -100, 1, -100]]) if labelled else None
    given = {"labels": labels, "beta": beta, "top_k": top_k, "add_tail": tail, **options}
    given["temperature"] = 0.5  # rounds nothing, so that topk finds the same words in theirs
    ours, theirs = (
        partial(f, **given)
        for f in (trl.iw_opd_generalized_jsd_loss, IWOPDTrainer.generalized_jsd_loss)
    )
    assert_models_agree(ours, theirs, *distinct_logits(2, 4, 300, dtype=dtype))


def test_iw_opd_s_terms_of_every_category_are_an_error():
    with pytest.raises(ValueError, match="reduction"):
        trl.iw_opd_generalized_jsd_loss(
            *distinct_logits(2, 4, 30, dtype=torch.float32), reduction="none"
        )


@every_bucket
@every_dtype
def test_buckets(bucket, dtype):
    logits, _ = distinct_logits(2, 4, 300, dtype=dtype)
    logprobs = logits.log_softmax(-1)[..., :40]
    theirs = partial(differentiated, bucket)
    (mine, grad), (other, its) = differentiated(trl.add_tail_bucket, logprobs), theirs(logprobs)
    exact, exact_grad = theirs(logprobs.double())
    for found, rough, truth in ((mine, other, exact), (grad, its, exact_grad)):
        assert found.dtype == dtype
        rounding = torch.finfo(dtype).eps * (1 + truth.abs())
        assert ((found - truth).abs() <= 2 * (rough - truth).abs() + rounding).all()


@pytest.mark.parametrize("module", WITH_MASKS)
def test_the_bucket_is_valid(module):
    logprobs = torch.randn(2, 3, 7).log_softmax(-1) - 0.1
    valid = torch.rand(2, 3, 7) < 0.5
    logprobs = torch.where(valid, logprobs, -torch.inf)
    ours, theirs = (
        f(logprobs, valid) for f in (trl.add_tail_bucket_and_mask, module._add_tail_bucket)
    )
    torch.testing.assert_close(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@every_bucket
@pytest.mark.parametrize(("left", "theirs_is_off"), [(1e-4, 1e-4), (1e-5, 1e-3), (1e-6, 1e-2)])
def test_a_small_bucket_has_its_digits_in_ours_alone(bucket, left, theirs_is_off):
    """Of fp32 log-probs, against what their probabilities leave exactly."""
    logprobs = torch.tensor([[math.log(0.75), math.log(0.25 - left)]])
    exact = (1 - logprobs.double().exp().sum()).log()
    ours, theirs = ((f(logprobs)[0, -1] - exact).abs() for f in (trl.add_tail_bucket, bucket))
    assert ours < 1e-6
    assert theirs > theirs_is_off


@every_bucket
def test_the_gradient_of_the_smallest_bucket_ends_in_theirs_alone(bucket):
    """What 8e-8 leaves: less than 1e-7, and more than 2^-24."""
    logprobs = torch.tensor([[-8e-8, -40.0]])
    ours, theirs = (differentiated(f, logprobs) for f in (trl.add_tail_bucket, bucket))
    torch.testing.assert_close(ours[0][0, -1], torch.tensor(8e-8).log())
    torch.testing.assert_close(theirs[0][0, -1], torch.tensor(1e-7).log())
    upstream = torch.tensor([1.0, 1.5, 2.0])
    assert torch.equal(theirs[1][0], upstream[:2])
    torch.testing.assert_close(ours[1][0, 0], upstream[0] - upstream[2] / 8e-8, rtol=1e-6, atol=0)


@every_bucket
def test_a_token_without_words_has_no_gradient_in_ours_and_nan_in_theirs(bucket):
    logprobs = torch.full((2, 3), -torch.inf)
    ours, theirs = (differentiated(f, logprobs) for f in (trl.add_tail_bucket, bucket))
    assert torch.equal(ours[0], theirs[0])
    assert ours[0][0].tolist() == [-torch.inf] * 3 + [0.0]
    assert torch.isfinite(ours[1]).all()
    assert torch.isnan(theirs[1]).all()


@every_beta
def test_one_word_renormalized_says_nothing_in_both(beta):
    """Its bucket does."""
    models = distinct_logits(2, 4, 30, dtype=torch.float64)
    options = {"distillation_topk": 1, "distillation_alpha": beta}
    for of in (trl, sdpo):
        loss = partial(of.compute_topk_self_distillation_loss, **options)
        for found in differentiated(partial(loss, distillation_add_tail=False), *models):
            torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-15)
        assert (differentiated(partial(loss, distillation_add_tail=True), *models)[0] > 0).all()


def test_masked_rows_have_no_value_and_no_gradient():
    student, teacher = leaves(*distinct_logits(2, 4, 30, dtype=torch.float32))
    mask = torch.tensor([[1.0, 0, 1, 0.5], [0, 0, 1, 1]])
    for tail in (False, True):
        options = {"distillation_topk": 5, "distillation_alpha": 0.5, "distillation_add_tail": tail}
        loss = partial(trl.compute_topk_self_distillation_loss, **options)
        value = loss(student, teacher, mask=mask)
        torch.testing.assert_close(value, loss(student, teacher) * mask)
        for grad in torch.autograd.grad(value.sum(), (student, teacher)):
            assert (grad[mask == 0] == 0).all()


def server_s_loss(logits, tail, logprobs, ids, labels):
    """Of the trainer on a stand-in: (value, the logits' gradient)."""
    trainer = SimpleNamespace(
        loss_add_tail=tail,
        _reduce_divergence_loss=server.ServerDistillationTrainer._reduce_divergence_loss,
    )
    loss = server.ServerDistillationTrainer._compute_server_forward_kl_loss
    given = {"topk_logprobs": logprobs, "topk_token_ids": ids}
    return differentiated(lambda x: loss(trainer, given, x.log_softmax(-1), labels), logits)


def test_patch_reaches_the_trainers():
    student, teacher = distinct_logits(2, 3, 50, dtype=torch.float32)
    options = {"distillation_topk": 5, "distillation_alpha": 0.3, "distillation_add_tail": True}
    logprobs, ids = teacher.log_softmax(-1).topk(5)
    logprobs[0, 1, 3:], ids[0, 1, 3:] = -torch.inf, 0  # as the server pads
    logprobs[1, 2], ids[1, 2] = -torch.inf, 0
    labels = torch.tensor([[1, 1, -100], [1, 1, -100]])
    theirs = [server_s_loss(student, tail, logprobs, ids, labels) for tail in (False, True)]
    before = IWOPDTrainer.generalized_jsd_loss
    with klfast.compat.patch("trl", strict=True):
        for trainer in (sdft_trainer, sdpo_trainer):
            value = trainer.compute_topk_self_distillation_loss(student, teacher, **options)
            expected = trl.compute_topk_self_distillation_loss(student, teacher, **options)
            assert torch.equal(value, expected)
            value = trainer.add_tail_bucket(logprobs)
            assert torch.equal(value, trl.add_tail_bucket(logprobs))
        for module in WITH_MASKS:
            value, _ = module._add_tail_bucket(logprobs, logprobs > -torch.inf)
            assert torch.equal(value, trl.add_tail_bucket(logprobs))
        value = IWOPDTrainer.generalized_jsd_loss(student, teacher, beta=0.3, top_k=7)
        expected = trl.iw_opd_generalized_jsd_loss(student, teacher, beta=0.3, top_k=7)
        assert torch.equal(value, expected)
        ours = [server_s_loss(student, tail, logprobs, ids, labels) for tail in (False, True)]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[0], other[0])
        exist = labels != -100  # theirs has a NaN gradient where the server has no word
        torch.testing.assert_close(mine[1][exist], other[1][exist], rtol=1e-4, atol=1e-6)
    assert IWOPDTrainer.generalized_jsd_loss is before


@pytest.mark.parametrize("name", ["_add_tail_bucket", "_jsd_divergence"])
def test_iw_opd_with_another_callee_is_left_alone(monkeypatch, name):
    monkeypatch.setattr(iw_opd_trainer, name, lambda *args: args)
    before = IWOPDTrainer.generalized_jsd_loss
    with klfast.compat.patch("trl") as made:
        assert IWOPDTrainer.generalized_jsd_loss is before
        assert any(left.where.endswith("IWOPDTrainer.generalized_jsd_loss") for left in made.left)
