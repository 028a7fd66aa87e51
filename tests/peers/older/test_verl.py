"""``patch("verl")`` in older releases: everything is known, and does what verl's own does."""

from pathlib import Path

import pytest
from comparison import (
    assert_agrees,
    assert_entropies_agree,
    assert_logprobs_agree,
    every_dtype,
    every_spread,
    inputs,
    logits_and_index,
)
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import torch_functional

import klfast
from klfast.compat import presets, verl


def test_the_release_is_the_one_asked_for(release):
    assert Path(core_algos.__file__).is_relative_to(release[0])


def test_everything_is_known(whole_patch):
    """But for the weights of the rollout correction, whose metrics were others up to 0.7.1, and a
    distillation that came later.
    """
    assert [each.where.rpartition(":")[2] for each in whole_patch.left] == [
        "_parse_rollout_is_threshold",
        "compute_rollout_correction_and_rejection_mask",
        "compute_rollout_correction_and_add_to_batch",
        "compute_forward_kl_topk",
    ]
    names = {each.where.rpartition(":")[2] for each in whole_patch.replaced}
    assert {"kl_penalty", "agg_loss", "apply_kl_penalty", "logprobs_from_logits"} < names
    assert {"compute_offpolicy_metrics", "compute_rollout_rejection_mask"} < names
    assert len(names) == 12


def test_who_imported_by_name_is_reached():
    before = ray_trainer.agg_loss
    with klfast.compat.patch("verl"):
        assert ray_trainer.agg_loss is core_algos.agg_loss is not before
    assert ray_trainer.agg_loss is core_algos.agg_loss is before


@every_dtype
@every_spread
@pytest.mark.parametrize("mode", presets.VERL)
def test_every_mode(release, mode, spread, dtype):
    logprobs, ref_logprobs, *_ = inputs(spread, dtype)
    if mode.endswith("+") and release[2].startswith("0.7"):
        with pytest.raises(NotImplementedError):
            core_algos.kl_penalty(logprobs, ref_logprobs, mode)
        return
    assert_agrees(verl.kl_penalty, core_algos.kl_penalty, logprobs, ref_logprobs, mode)


@every_dtype
@pytest.mark.parametrize("mode", sorted({*verl.REDUCTIONS} - {"token-sum"}))
@pytest.mark.parametrize(
    "counts",
    [{}, {"dp_size": 4, "batch_num_tokens": 50, "global_batch_size": 16}, {"loss_scale_factor": 9}],
    ids=["local", "global", "scale"],
)
def test_every_average(mode, counts, dtype):
    logprobs, ref_logprobs, _, mask = inputs(0.3, dtype)

    def ours(logprobs, ref_logprobs):
        return verl.kl_loss(logprobs, ref_logprobs, "k3", mask, mode, **counts)

    def theirs(logprobs, ref_logprobs):
        loss = core_algos.kl_penalty(logprobs, ref_logprobs, "k3")
        return core_algos.agg_loss(loss, mask, mode, **counts)

    assert_agrees(ours, theirs, logprobs, ref_logprobs)


@every_dtype
def test_log_probs_and_entropies(monkeypatch, dtype):
    # What stand_ins serves for flash-attn is no cross entropy.
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    logits, labels = logits_and_index(dtype)
    assert_logprobs_agree(
        verl.logprobs_from_logits, torch_functional.logprobs_from_logits, logits, labels
    )
    assert_entropies_agree(verl.entropy_from_logits, torch_functional.entropy_from_logits, logits)
