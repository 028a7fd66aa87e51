"""klfast.compat.trl's losses over a few words against those of TRL's SDFT, SDPO and IW-OPD."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from agreement_logits import assert_models_agree, differentiated, distinct_logits
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
