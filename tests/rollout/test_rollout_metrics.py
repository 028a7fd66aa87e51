"""Other frameworks' metrics from RolloutStats, as the table of docs/rollout.md says.

verl's are compared with verl's own functions in tests/peers/verl.
"""

import pytest
import torch
from agreement_rollout import sampled

import klfast
from klfast import Rejection
from klfast.types.rollout_formulas import SUMS

MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
"""TRL's vllm_importance_sampling_mode -> (weight, outside)."""


def batch():
    """(logprobs, rollout_logprobs, mask) in float64; every sequence keeps a token."""
    pair = sampled((5, 8), torch.float64)
    mask = torch.rand(5, 8) < 0.7
    mask[:, 0] = True
    return *pair, mask


@pytest.mark.parametrize("bounds", [(None, 1.3), (0.8, 1.2), (0.8, None)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_trl_s_ratios_and_metrics(backend, mode, bounds):
    """Of GRPO: the log-ratio is multiplied by the mask, and a sequence has one ratio [B, 1]."""
    logprobs, rollout_logprobs, mask = batch()
    low, high = bounds
    weight, outside = MODES[mode]
    difference = (logprobs - rollout_logprobs) * mask
    logs = difference.sum(-1, keepdim=True) if weight == "sequence" else difference
    ratio = logs.exp()
    if outside == "truncate":
        ratio = ratio.clamp(low, high)
    else:
        within = torch.ones_like(ratio, dtype=torch.bool)
        within &= ratio >= (low or 0)
        within &= ratio <= (high or torch.inf)
        ratio = ratio * within
    weights, _, s = klfast.rollout_correction(
        logprobs,
        rollout_logprobs,
        mask,
        weight=weight,
        outside=outside,
        floor=low,
        cap=high,
        backend=backend,
    )
    torch.testing.assert_close(weights[mask], ratio.expand_as(weights)[mask])
    delta = (logprobs - rollout_logprobs).abs()[mask]
    torch.testing.assert_close(s.abs.sum() / s.length.sum(), delta.mean())
    torch.testing.assert_close(
        torch.maximum(s.max_log_ratio.max(), -s.min_log_ratio.min()), delta.max()
    )
    flat = ratio.flatten() if weight == "sequence" else ratio[mask]
    torch.testing.assert_close(s.min_weight.min(), flat.min())
    torch.testing.assert_close(s.max_weight.max(), flat.max())
    mean = s.weight.sum() / s.length.sum()
    if weight == "sequence":
        mean = (s.weight / s.length).mean()
    torch.testing.assert_close(mean, flat.mean())


def test_nemo_rl_s_errors(backend):
    """token_mult_prob_error and gen_kl_error, means over the kept tokens."""
    logprobs, rollout_logprobs, mask = batch()
    s = klfast.rollout_correction(logprobs, rollout_logprobs, mask, backend=backend).stats
    difference = rollout_logprobs - logprobs
    error = (difference.abs() * mask).exp()[mask].mean()
    torch.testing.assert_close(1 + s.error.sum() / s.length.sum(), error)
    log_ratio = -difference
    kl = (log_ratio.exp() - 1 - log_ratio)[mask].mean()
    torch.testing.assert_close(s.k3.sum() / s.length.sum(), kl)


def test_nemo_rl_s_fraction_out_of_bounds(backend):
    """Of tokens with "tis" and "icepop", of sequences with "seq-mask-tis"."""
    logprobs, rollout_logprobs, mask = batch()
    x = logprobs - rollout_logprobs
    s = klfast.rollout_correction(
        logprobs,
        rollout_logprobs,
        mask,
        floor=0.8,
        cap=1.2,
        reject=Rejection("ratio", "seq-mean", low=0.95, high=1.1),
        backend=backend,
    ).stats
    ratio = x.exp()[mask]
    beyond = ((ratio < 0.8) | (ratio > 1.2)).double().mean()
    torch.testing.assert_close(s.outside.sum() / s.tokens.sum(), beyond)
    mean = ((x * mask).sum(-1) / mask.sum(-1)).exp()
    beyond = ((mean < 0.95) | (mean > 1.1)).double()
    assert 0 < beyond.sum() < len(beyond)
    torch.testing.assert_close((s.rejected > 0).double(), beyond)


def test_sums_are_fields_in_their_order():
    assert [name for name in klfast.RolloutStats._fields if name in SUMS] == list(SUMS)
