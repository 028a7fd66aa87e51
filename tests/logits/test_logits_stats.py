"""KLStats of exact divergences."""

import math

import agreement_logits as al
import pytest
import torch
from agreement import same_bits

import klfast

pytestmark = pytest.mark.usefixtures("one_thread")

OF_TOKENS = ("k1", "k2", "k3", "max_abs_log_ratio")
MASK = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [2.0, 1.0, 1.0]])


@al.every_direction
def test_what_is_said_of_tokens_is_kl_penaltys(backend, direction):
    """The statistics belong to the log-probs that the call returns."""
    logits = al.random_logits(3, 3, 37)
    ids, mask = al.random_ids(logits[0]), MASK.to(logits[0].device)
    for reduction in ("none", "seq-mean", "token-mean"):
        options = {"direction": direction, "reduction": reduction, "backend": backend}
        found = klfast.kl_divergence(*logits, mask, token_ids=ids, return_stats=True, **options)
        _, expected = klfast.kl_penalty(
            found.logprobs, found.ref_logprobs, mask, return_stats=True, backend=backend
        )
        assert all(same_bits(getattr(found.stats, f), getattr(expected, f)) for f in OF_TOKENS)
        assert found.stats.max_abs_log_ratio[2] > 0


@al.every_direction
def test_what_is_not_finite_is_counted(backend, direction):
    """Only kept rows with NaN or an infinite divergence count."""
    logits, ref_logits = al.random_logits(3, 3, 37)
    logits[0, 0, 5] = math.nan
    logits[0, 1, 5] = math.nan  # masked
    excluded = logits if direction == "forward" else ref_logits
    excluded[2, :2, 7] = -math.inf
    options = {"direction": direction, "return_stats": True, "backend": backend}
    stats = klfast.kl_divergence(logits, ref_logits, MASK.to(logits.device), **options).stats
    is_kl = direction in ("reverse", "forward")
    of_excluded = 2 if is_kl else 0
    assert stats.nonfinite.tolist() == [1, 0, of_excluded]
    assert stats.kl[0].isnan()
    assert stats.kl[1] == 0
    assert stats.kl[2] == math.inf if is_kl else stats.kl[2].isfinite()
