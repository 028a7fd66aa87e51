"""The frameworks' options for the drift between sampler and trainer: errors under their names."""

import pytest
import torch
from refusals import POSITIVE

from klfast.compat import verl
from klfast.compat.trl import importance_sampling_ratio


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"clip_max": 0.0}, f"clip_max {POSITIVE}, got 0.0"),
        ({"clip_max": -1}, f"clip_max {POSITIVE}, got -1"),
        ({"clip_min": 4.0}, "clip_min must be <= clip_max=3.0, got 4.0"),
    ],
    ids=str,
)
def test_limits_of_trl(limits, message):
    logps = torch.randn(2, 3)
    with pytest.raises(ValueError, match=f"^{message}$"):
        importance_sampling_ratio(logps, logps, torch.ones(2, 3), **limits)


@pytest.mark.parametrize("threshold", [0.5, "0.5"])
@pytest.mark.parametrize("rule", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_a_threshold_of_k1_below_its_own_inverse(rule, threshold):
    logps = torch.randn(2, 3)
    with pytest.raises(ValueError, match=f"^rollout_rs_threshold must be >= 1 for '{rule}'"):
        verl.compute_rollout_rejection_mask(
            logps, torch.ones(2, 3), rollout_rs=rule, rollout_rs_threshold=threshold
        )
