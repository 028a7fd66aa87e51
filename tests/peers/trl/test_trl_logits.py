"""klfast.compat.trl over logits against ``trl.trainer.utils``, and trainers that call it.

GRPO and RLOO take log-probs from hidden states, and never have logits.
"""

import pytest
import tiny
import torch
from agreement_of_runs import assert_same_training
from comparison import (
    assert_close,
    assert_no_farther,
    assert_same_arguments,
    logits_and_index,
    reaching,
    same_numbers,
)
from datasets import Dataset
from transformers import PrinterCallback
from trl.experimental.async_distillation import async_distillation_trainer
from trl.experimental.cpo import CPOConfig, CPOTrainer, cpo_trainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.iw_opd import iw_opd_trainer
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer, orpo_trainer
from trl.experimental.sdft import loss_utils as sdft
from trl.experimental.sdpo import loss_utils
from trl.experimental.server_distillation import server_distillation_trainer
from trl.experimental.tpo import TPOConfig, TPOTrainer, tpo_trainer
from trl.trainer import utils

import klfast
from klfast.compat import trl

NAMES = ["selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy"]


def test_arguments_have_trl_s_names_order_and_defaults():
    assert_same_arguments(utils, trl, *NAMES)
    names = "compute_divergence", "compute_full_logit_self_distillation_loss"
    for module in (sdft, loss_utils):
        topk = "add_tail_bucket", "compute_topk_self_distillation_loss"
        assert_same_arguments(module, trl, *names, *topk)
    assert_same_arguments(GKDTrainer, trl, "generalized_jsd_loss")
    assert_same_arguments(IWOPDTrainer.generalized_jsd_loss, trl.iw_opd_generalized_jsd_loss)
    for module in (iw_opd_trainer, server_distillation_trainer, async_distillation_trainer):
        assert_same_arguments(module._add_tail_bucket, trl.add_tail_bucket_and_mask)


test_over_logits = same_numbers(
    trl, {name: getattr(utils, name) for name in NAMES}, "trl logprobs", "trl joint", "trl entropy"
)


@pytest.mark.parametrize("entropy_requires_grad", [True, False])
def test_both_at_once_under_a_mask_and_without_a_gradient(entropy_requires_grad):
    logits, index = logits_and_index(torch.float32)
    mask = torch.rand(index.shape) < 0.6
    options = {"entropy_requires_grad": entropy_requires_grad, "row_mask": mask}
    results = []
    for function in (
        trl.selective_log_softmax_and_entropy,
        utils.selective_log_softmax_and_entropy,
    ):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = function(leaf, index, **options)
        assert entropy.requires_grad == entropy_requires_grad
        (grad,) = torch.autograd.grad(logprobs.sum() + 2 * entropy.sum(), leaf)
        results.append((logprobs.detach(), entropy.detach(), grad))
    assert_close(*results)


def test_exact_keeps_trl_s_dtype():
    logits, index = logits_and_index(torch.bfloat16)
    assert_no_farther(
        lambda x, index: trl.selective_log_softmax(x, index, exact=True),
        utils.selective_log_softmax,
        logits,
        index,
    )
    assert_no_farther(
        lambda x: trl.entropy_from_logits(x, exact=True), utils.entropy_from_logits, logits
    )


@pytest.mark.parametrize(("exact", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_patch_reaches_every_module_that_imported_by_name(exact, dtype):
    holders = [(utils, name) for name in NAMES] + [(tpo_trainer, NAMES[2])]
    holders += [(module, NAMES[0]) for module in (cpo_trainer, orpo_trainer, loss_utils)]
    logits, index = logits_and_index(torch.bfloat16)
    with reaching("trl", *holders, exact=exact):
        found = cpo_trainer.selective_log_softmax(logits, index)
        assert torch.equal(found, trl.selective_log_softmax(logits, index).to(dtype))
        assert found.dtype == dtype


def preferences(count=32):
    """Prompts, each with three completions, of one to six words."""
    rows = []
    for row in range(count):
        words = [tiny.WORDS[(5 * row + 3 * place) % len(tiny.WORDS)] for place in range(16)]
        ends = (2, 4 + row % 3, 9 + row % 2, 10 + row % 6)
        parts = [" ".join(words[a:b]) for a, b in zip((0, *ends), ends, strict=False)]
        rows.append(dict(zip(("prompt", "chosen", "rejected", "reference"), parts, strict=True)))
    return Dataset.from_list(rows)


TRAINERS = {
    "cpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "tpo": (TPOTrainer, TPOConfig),
}


def train(folder, trainer_class, configuration):
    settings = tiny.settings(folder, steps=3)
    for name in ("num_generations", "max_completion_length"):
        del settings[name]
    columns = ("prompt", "chosen", "rejected", "reference")[
        : 4 if trainer_class is TPOTrainer else 3
    ]
    trainer = trainer_class(
        model=tiny.model(),
        args=configuration(**settings),
        train_dataset=preferences().select_columns(list(columns)),
        processing_class=tiny.tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    return tiny.finish(trainer)


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_that_have_logits_train_the_same(tmp_path, kind, monkeypatch):
    theirs = train(tmp_path / "theirs", *TRAINERS[kind])
    calls = []
    for module in (klfast.compat.common, trl):
        name = "token_logprobs" if module is trl else "fused_token_logprobs"
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, real=real, **options: calls.append(a) or real(*a, **options)
        )
    with klfast.compat.patch("trl"):
        ours = train(tmp_path / "ours", *TRAINERS[kind])
    assert len(calls) >= 3
    assert_same_training(ours, theirs)
    assert theirs.logs[0]["loss"] != theirs.logs[-1]["loss"]
