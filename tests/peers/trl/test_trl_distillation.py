"""klfast.compat.trl's distillation losses against TRL's GKD, SDFT, SDPO and IW-OPD."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from agreement_logits import differentiated, distinct_logits, random_logits
from comparison import assert_close, same_numbers
from trl.experimental.async_distillation import async_distillation_trainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.iw_opd import iw_opd_trainer
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
from trl.experimental.sdft import loss_utils as sdft
from trl.experimental.sdft import sdft_trainer
from trl.experimental.sdpo import loss_utils as sdpo
from trl.experimental.sdpo import sdpo_trainer
from trl.experimental.server_distillation import server_distillation_trainer as server

import klfast
from klfast.compat import trl

WITH_MASKS = (iw_opd_trainer, server, async_distillation_trainer)


def gkd(*models, num_items_in_batch=None, reduction="batchmean", **options):
    """TRL's loss. It ignores ``reduction`` if there is a number of items."""
    if num_items_in_batch is not None:
        options["num_items_in_batch"] = torch.as_tensor(num_items_in_batch)
        reduction = "batchmean"
    return GKDTrainer.generalized_jsd_loss(*models, reduction=reduction, **options)


def under_the_mask(name, module):
    """TRL's function times the mask, because it has none."""

    def call(student, teacher, *, mask, **options):
        return getattr(module, name)(student, teacher, **options) * mask

    return call


test_gkd = same_numbers(trl, {"generalized_jsd_loss": gkd}, "trl gkd")
test_iw_opd = same_numbers(
    trl, {"iw_opd_generalized_jsd_loss": IWOPDTrainer.generalized_jsd_loss}, "trl iw_opd"
)
FULL, TOPK = (f"compute_{of}_self_distillation_loss" for of in ("full_logit", "topk"))
test_sdft, test_sdpo = (
    same_numbers(
        trl,
        {name: under_the_mask(name, module) for name in (FULL, TOPK)},
        *("trl self-distillation", "trl top-k"),
    )
    for module in (sdft, sdpo)
)


@pytest.mark.parametrize("module", [sdft, sdpo, *WITH_MASKS], ids=lambda of: of.__name__)
def test_buckets(module):
    def theirs(logprobs):
        if module in WITH_MASKS:
            return module._add_tail_bucket(logprobs, torch.isfinite(logprobs))[0]
        return module.add_tail_bucket(logprobs)

    logprobs = random_logits(2, 4, 300, dtype=torch.float64)[0].log_softmax(-1)[..., :40]
    ours, others = (differentiated(f, logprobs) for f in (trl.add_tail_bucket, theirs))
    assert_close(ours, others, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tail", [False, True], ids=["renormalised", "tail"])
@pytest.mark.parametrize("module", [sdft, sdpo], ids=["sdft", "sdpo"])
@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_a_few_words_through_trl_s_own_top_k(beta, module, tail, monkeypatch):
    theirs = partial(
        module.compute_topk_self_distillation_loss,
        distillation_topk=20,
        distillation_alpha=beta,
        distillation_add_tail=tail,
    )
    models = random_logits(2, 4, 500, dtype=torch.float64)
    expected = differentiated(theirs, *models)
    monkeypatch.setattr(module, "compute_divergence", trl.compute_divergence)
    assert_close(differentiated(theirs, *models), expected, rtol=1e-10, atol=1e-12)


def test_patch_reaches_the_trainers():
    logits = random_logits(2, 3, 50)
    before = GKDTrainer.generalized_jsd_loss
    with klfast.compat.patch("trl", strict=True):
        patched = GKDTrainer.generalized_jsd_loss(*logits, beta=0.3)
        assert torch.equal(patched, trl.generalized_jsd_loss(*logits, beta=0.3))
        for trainer in (sdft_trainer, sdpo_trainer):
            value = trainer.compute_full_logit_self_distillation_loss(
                *logits, distillation_alpha=0.3
            )
            expected = trl.compute_full_logit_self_distillation_loss
            assert torch.equal(value, expected(*logits, distillation_alpha=0.3))
            logprobs = [x.log_softmax(-1) for x in logits]
            value = trainer.compute_divergence(*logprobs, 0.3)
            assert torch.equal(value, trl.compute_divergence(*logprobs, 0.3))
    assert GKDTrainer.generalized_jsd_loss is before


def server_s_loss(logits, tail, logprobs, ids, labels):
    """The trainer's loss and the logits' gradient. A stand-in is the trainer."""
    trainer = SimpleNamespace(
        loss_add_tail=tail,
        _reduce_divergence_loss=server.ServerDistillationTrainer._reduce_divergence_loss,
    )
    loss = server.ServerDistillationTrainer._compute_server_forward_kl_loss
    given = {"topk_logprobs": logprobs, "topk_token_ids": ids}
    return differentiated(lambda x: loss(trainer, given, x.log_softmax(-1), labels), logits)


def test_patch_reaches_the_trainers_of_a_few_words():
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
        exist = labels != -100  # TRL's gradient is NaN where the server has no token id
        torch.testing.assert_close(mine[1][exist], other[1][exist], rtol=1e-4, atol=1e-6)
    assert IWOPDTrainer.generalized_jsd_loss is before


@pytest.mark.parametrize("name", ["_add_tail_bucket", "_jsd_divergence"])
def test_iw_opd_with_another_callee_is_left_alone(monkeypatch, name):
    monkeypatch.setattr(iw_opd_trainer, name, lambda *args: args)
    before = IWOPDTrainer.generalized_jsd_loss
    with klfast.compat.patch("trl") as made:
        assert IWOPDTrainer.generalized_jsd_loss is before
        assert any(left.where.endswith("IWOPDTrainer.generalized_jsd_loss") for left in made.left)
