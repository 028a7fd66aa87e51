"""Comparisons of ``rollout_correction`` with its oracle."""

import oracle
import oracle_rollout
import torch
from torch.utils._pytree import tree_map_only

import klfast
from klfast import RolloutStats


def sampled(shape, dtype=torch.float32, spread=0.3):
    """(logprobs, rollout_logprobs), as a trainer and a sampler compute them."""
    rollout = -3 * torch.rand(shape, dtype=torch.float64) - 0.05
    logprobs = (rollout + spread * torch.randn(shape, dtype=torch.float64)).clamp(max=-1e-3)
    return logprobs.to(dtype), rollout.to(dtype)


def truth_of(*tensors, **options):
    """The oracle's results. They are slow to compute, so all backends share one call."""
    key = repr(tree_map_only(torch.Tensor, lambda t: (t.dtype, t.tolist()), (tensors, options)))
    if key not in _truths:
        _truths[key] = oracle_rollout.rollout_correction(*tensors, **options)
    return _truths[key]


_truths = {}


def assert_agrees(backend, logprobs, rollout_logprobs, mask=None, **options):
    """Compare the weights, the mask, the statistics and the criteria with the oracle."""
    truth = truth_of(logprobs, rollout_logprobs, mask, **options)
    weights, kept, stats = klfast.rollout_correction(
        logprobs, rollout_logprobs, mask, backend=backend, **options
    )
    arithmetic = oracle.arithmetic_dtype(logprobs, rollout_logprobs)
    if options.get("weight", "token") is None:
        assert weights is None
    else:
        assert weights.dtype == arithmetic
        assert not weights.requires_grad
        oracle.assert_within(weights, truth.weights, truth.weights_tolerance, "weights")
    expected = truth.mask if mask is None else torch.where(truth.mask, mask, torch.zeros_like(mask))
    assert kept.dtype == expected.dtype
    assert torch.equal(kept, expected)
    for name in RolloutStats._fields[:-1]:
        value = getattr(stats, name)
        assert value.dtype == arithmetic
        if truth.stats:
            oracle.assert_within(value, truth.stats[name], truth.tolerance[name], name)
    assert len(stats.rules) == len(truth.rules)
    for seen, exact in zip(stats.rules, truth.rules, strict=True):
        for name in seen._fields if exact else ():
            rounding = 1e-5 if arithmetic == torch.float32 else 1e-12
            torch.testing.assert_close(
                getattr(seen, name).double(), exact[name], rtol=rounding, atol=rounding
            )
    return truth
