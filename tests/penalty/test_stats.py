"""KLStats: fields by hand, and results on disk. ``assert_agrees`` compares with the oracle."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Estimator
from klfast.compat import trlx


def stats_of(backend, logprobs, ref_logprobs, mask=None, **options):
    return klfast.kl_penalty(
        logprobs, ref_logprobs, mask, return_stats=True, backend=backend, **options
    )[1]


def test_fields_by_hand(backend):
    """Log-ratios 1, -2 | 4 | none kept, under k1 clipped to [-3, 3]."""
    stats = stats_of(
        backend,
        torch.tensor([[1.0, -2.0], [4.0, 9.0], [7.0, 7.0]]),
        torch.zeros(3, 2),
        torch.tensor([[1.0, 0.5], [1.0, 0.0], [0.0, 0.0]]),
        estimator=Estimator("k1", log_ratio_clip=3),
    )
    assert stats.kl.tolist() == [0, 3, 0]
    assert stats.length.tolist() == [1.5, 1, 0]
    assert stats.k1.tolist() == [0, 4, 0]
    assert stats.k2.tolist() == [1.5, 8, 0]
    k3 = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    k3 = torch.expm1(-k3) + k3
    expected = torch.stack([k3[0] + k3[1] / 2, k3[2], torch.zeros(())])
    torch.testing.assert_close(stats.k3.double(), expected, rtol=1e-6, atol=0)
    assert stats.max_abs_log_ratio.tolist() == [2, 4, 0]
    assert stats.clipped.tolist() == [0, 1, 0]
    assert stats.nonfinite.tolist() == [0, 0, 0]


def test_a_bound_that_is_reached_has_not_acted(backend):
    logprobs = torch.tensor([0.5, -0.5, 0.75])
    for options in ({"log_ratio_clip": 0.5}, {"kl_clip": 0.5}):
        estimator = Estimator("k1", **options)
        assert stats_of(backend, logprobs, torch.zeros(3), estimator=estimator).clipped == 1


def results():
    """One of each named tuple that klfast returns with tensors in it."""
    logprobs = -torch.rand(2, 5) - 0.1
    other = logprobs + 0.2
    rule = klfast.Rejection("k1", "seq-mean", high=1.0)
    corrected = klfast.rollout_correction(logprobs, other, reject=rule)
    logits, ids = torch.randn(2, 5, 7), torch.arange(10).view(2, 5) % 7
    return {
        "KLStats": klfast.kl_penalty(logprobs, other, return_stats=True)[1],
        "KLDivergence": klfast.kl_divergence(logits, logits + 0.1, token_ids=ids),
        "TokenLogprobs": klfast.token_logprobs(logits, ids, return_entropy=True),
        "TokenLoss": klfast.linear_token_loss(logits, torch.randn(9, 7), ids, torch.neg),
        "RolloutCorrection": corrected,
        "RolloutStats": corrected.stats,
        "RuleStats": corrected.stats.rules[0],
        "LogRatioProfile": klfast.log_ratio_profile(logprobs, other),
        "WorstToken": klfast.worst_tokens(logprobs, other, k=1)[0],
        "MeanKL": trlx.mean_kl(logprobs, other, torch.ones(2, 5)),
    }


@pytest.mark.parametrize("name", results())
def test_results_are_saved_and_loaded_as_weights_alone(tmp_path, name):
    result = results()[name]
    torch.save({"result": result}, tmp_path / "result.pt")
    loaded = torch.load(tmp_path / "result.pt", weights_only=True)["result"]
    assert type(loaded) is type(result)
    for found, expected in zip(tree_leaves(loaded), tree_leaves(result), strict=True):
        assert found is expected or torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize(
    "settings",
    [
        klfast.Estimator("k3+", log_ratio_clip=(-1, 2), linear_tail=3.0),
        klfast.Rejection("ratio", "seq-min", low=1e-4),
    ],
    ids=lambda settings: type(settings).__name__,
)
def test_settings_are_saved_and_loaded_as_weights_alone(tmp_path, settings):
    torch.save([settings], tmp_path / "settings.pt")
    assert torch.load(tmp_path / "settings.pt", weights_only=True) == [settings]


def test_every_named_tuple_of_tensors_is_among_them():
    """Named tuples of text, which a patch returns, are left out."""
    frameworks = (getattr(klfast.compat, name) for name in klfast.compat.FRAMEWORKS)
    public = {
        value
        for module in (klfast, klfast.compat, *frameworks)
        for value in map(vars(module).get, module.__all__)
        if isinstance(value, type) and issubclass(value, tuple)
    }
    of_text = {klfast.compat.Replaced, klfast.compat.Left, klfast.compat.Framework}
    assert {kind.__name__ for kind in public - of_text} == results().keys()
