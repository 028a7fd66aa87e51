"""klfast.compat.trl's distillation losses against those of TRL's GKD, SDFT and SDPO."""

from functools import partial

import pytest
import torch
from agreement_logits import assert_models_agree, differentiated, random_logits
from comparison import every_dtype
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.sdft import loss_utils as sdft
from trl.experimental.sdft import sdft_trainer
from trl.experimental.sdpo import loss_utils as sdpo
from trl.experimental.sdpo import sdpo_trainer

import klfast
from klfast.compat import trl

every_beta = pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1])


OPTIONS = {
    "batchmean": {},
    "sum": {"reduction": "sum"},
    "mean": {"reduction": "mean"},
    "number": {"num_items_in_batch": torch.tensor(11)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("labelled", [False, True], ids=["", "labels"])
@every_dtype
@every_beta
def test_gkd(beta, dtype, labelled, temperature, options):
    student, teacher = random_logits(2, 4, 500, dtype=dtype)
    labels = torch.tensor([[1, -100, 1, 1], [-100, -100, 1, -100]]) if labelled else None
    given = {"labels": labels, "beta": beta, "temperature": temperature, **options}
    ours, theirs = (
        partial(f, **given) for f in (trl.generalized_jsd_loss, GKDTrainer.generalized_jsd_loss)
    )
    assert_models_agree(ours, theirs, student, teacher)


@every_dtype
@every_beta
def test_self_distillation(beta, dtype):
    models = random_logits(2, 4, 500, dtype=dtype)
    full = trl.compute_full_logit_self_distillation_loss
    for module in (sdft, sdpo):
        theirs = module.compute_full_logit_self_distillation_loss
        ours, eager = (partial(f, distillation_alpha=beta) for f in (full, theirs))
        assert_models_agree(ours, eager, *models)


@pytest.mark.parametrize("tail", [False, True], ids=["renormalised", "tail"])
@pytest.mark.parametrize("module", [sdft, sdpo], ids=["sdft", "sdpo"])
@every_beta
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
    for result, exact in zip(differentiated(theirs, *models), expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-10, atol=1e-12)


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
