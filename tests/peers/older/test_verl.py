"""``patch("verl")`` in older releases: all code is known, and klfast's numbers are verl's."""

from importlib import metadata
from pathlib import Path

import pytest
from comparison import same_numbers
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import torch_functional

import klfast
from klfast.compat import presets, verl

VERSION = metadata.version("verl")
OVER_LOGITS = ("logprobs_from_logits", "entropy_from_logits")


def test_the_release_is_the_one_asked_for(release):
    assert Path(core_algos.__file__).is_relative_to(release[0])


def test_everything_is_known(whole_patch):
    """Two parts are left: the weights of the rollout correction, whose metrics differ up to 0.7.1,
    and a later distillation.
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


@pytest.fixture(autouse=True)
def _without_flash_attn(monkeypatch):
    """The stand-in of flash-attn has no cross entropy."""
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)


# 0.7 has neither the estimators with a "+" nor "token-sum".
test_penalties = same_numbers(
    verl,
    {"kl_penalty": core_algos.kl_penalty},
    *(f"verl {mode}" for mode in presets.VERL if VERSION[:3] != "0.7" or "+" not in mode),
)
test_averages = same_numbers(
    verl,
    {"agg_loss": core_algos.agg_loss},
    *(f"verl agg_loss {mode}" for mode in verl.REDUCTIONS if mode != "token-sum"),
)
test_over_logits = same_numbers(
    verl,
    {name: getattr(torch_functional, name) for name in OVER_LOGITS},
    *("verl logprobs", "verl entropy"),
)
