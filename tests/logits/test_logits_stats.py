"""KLStats of exact divergences, and what controllers and the monitor make of them."""

import math

import pytest
import torch
from agreement import same_bits
from agreement_logits import DIRECTIONS, random_ids, random_logits

import klfast
from klfast import AdaptiveKLController, ExponentialKLController, KLMonitor

pytestmark = pytest.mark.usefixtures("one_thread")

OF_TOKENS = ("k1", "k2", "k3", "max_abs_log_ratio")
MASK = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [2.0, 1.0, 1.0]])

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def call(backend, *logits, ids=None, mask=MASK, **options):
    """(result, statistics)."""
    found = klfast.kl_divergence(
        *logits, mask, token_ids=ids, return_stats=True, backend=backend, **options
    )
    return found.kl, found.stats


@every_direction
def test_what_is_said_of_tokens_is_kl_penaltys(backend, direction):
    """Of the log-probs that the call returns."""
    logits = random_logits(3, 3, 37)
    ids = random_ids(logits[0])
    for reduction in ("none", "seq-mean", "token-mean"):
        options = {"direction": direction, "reduction": reduction, "backend": backend}
        found = klfast.kl_divergence(*logits, MASK, token_ids=ids, return_stats=True, **options)
        _, expected = klfast.kl_penalty(
            found.logprobs, found.ref_logprobs, MASK, return_stats=True, backend=backend
        )
        assert all(same_bits(getattr(found.stats, f), getattr(expected, f)) for f in OF_TOKENS)
        assert found.stats.max_abs_log_ratio[2] > 0


def test_without_ids_nothing_is_said_of_tokens(backend):
    for reduction in ("none", "token-mean"):
        _, stats = call(backend, *random_logits(3, 3, 37), reduction=reduction)
        assert all(getattr(stats, field).isnan().all() for field in OF_TOKENS)


@every_direction
def test_what_is_not_finite_is_counted(backend, direction):
    """Of kept rows alone: NaN, and an infinite divergence."""
    logits, ref_logits = random_logits(3, 3, 37)
    logits[0, 0, 5] = math.nan
    logits[0, 1, 5] = math.nan  # masked
    excluded = ref_logits if direction != "forward" else logits
    excluded[2, :2, 7] = -math.inf
    _, stats = call(backend, logits, ref_logits, direction=direction)
    of_excluded = 0 if direction == "jsd" else 2
    assert stats.nonfinite.tolist() == [1, 0, of_excluded]
    assert stats.kl[0].isnan()
    assert stats.kl[1] == 0
    assert stats.kl[2].isfinite() if direction == "jsd" else stats.kl[2] == math.inf


def test_controllers_and_the_monitor_take_them(backend):
    """Two policies: one 0.02 nats from the reference, one some nats."""
    near, far = random_logits(2, 4, 200, apart=0.2), random_logits(2, 4, 200, apart=4.0)
    for with_ids in (False, True):
        for logits, is_near in ((near, True), (far, False)):
            ids = random_ids(logits[0]) if with_ids else None
            _, stats = call(backend, *logits, ids=ids, mask=None, reduction="token-mean")
            rows = klfast.kl_divergence(*logits, backend="reference")
            mean = rows.sum(-1).mean().item()
            adaptive = AdaptiveKLController(0.1, target=1.0)
            expected = AdaptiveKLController(0.1, target=1.0)
            adaptive.update(stats)
            expected.update(mean, n_steps=2)
            assert adaptive.value == pytest.approx(expected.value, rel=1e-6)
            assert (adaptive.value < 0.1) == is_near
            exponential = ExponentialKLController(0.1, target=0.1)
            exponential.update(stats)
            assert (exponential.value < 0.1) == is_near
            status = "low" if is_near else "high"
            monitor = KLMonitor(0.1, unit="token", low=0.5, min_updates=1)
            with pytest.warns(RuntimeWarning, match=f"is {status}"):
                assert monitor.update(stats) == status
            assert adaptive.skipped == exponential.skipped == monitor.skipped == 0


def test_a_log_takes_them_as_a_dict(backend):
    logits = random_logits(3, 3, 37)
    rows = klfast.kl_divergence(*logits, mask=MASK, backend=backend)
    for ids in (None, random_ids(logits[0])):
        logged = call(backend, *logits, ids=ids)[1].as_dict()
        expected = (rows.sum() / MASK.sum()).item()
        assert logged["kl/token_mean"].item() == pytest.approx(expected, rel=1e-6)
        assert logged["kl/sequence_mean"].item() == pytest.approx(rows.sum().item() / 2, rel=1e-6)
        assert logged["kl/k1"].isnan() == (ids is None)
