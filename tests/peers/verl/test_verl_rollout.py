"""klfast.compat.verl's rollout correction against verl's own: weights, masks, every metric."""

import pytest
import torch
from comparison import assert_same_arguments
from ranks import assert_same_on_ranks, here, on_ranks
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import rollout_corr_helper as theirs

import klfast
from klfast.compat import verl

FUNCTIONS = [
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
]
LEVELS = ["token", "sequence"]
THRESHOLDS = [2.0, 1.3, "1.5", "0.5_5.0", "0.9_1.1"]
RULES = {
    "token_k1": ["0.7_1.3", "1.4"],
    "token_k2": ["0.05"],
    "token_k3": ["0.05"],
    "seq_sum_k1": ["0.5_2.0", "3"],
    "seq_sum_k2": ["1.0"],
    "seq_sum_k3": ["1.0"],
    "seq_mean_k1": ["0.95_1.05", "1.1"],
    "seq_mean_k2": ["0.045"],
    "seq_mean_k3": ["0.045"],
    "seq_max_k2": ["0.3"],
    "seq_max_k3": ["0.3"],
}
SPREADS = {"near": 1e-3, "random": 0.3, "wide": 1.5}

every_spread = pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
every_empty = pytest.mark.parametrize("empty", [False, True], ids=["full", "with-an-empty"])


def inputs(spread, empty=False, shape=(7, 40)):
    """(old_log_prob, rollout_log_prob, mask) in fp32. verl gets float64 copies."""
    rollout = -3 * torch.rand(shape)
    lengths = torch.linspace(0 if empty else 1, shape[1], shape[0]).long()
    mask = (torch.arange(shape[1]) < lengths[:, None]).long()
    return rollout + spread * torch.randn(shape), rollout, mask


def assert_metrics(mine, other):
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert mine[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


def test_arguments_and_rules_are_verl_s():
    assert_same_arguments(theirs, verl, *FUNCTIONS)
    assert set(verl.ROLLOUT_RULES) == theirs.SUPPORTED_ROLLOUT_RS_OPTIONS == set(RULES)


@every_empty
@every_spread
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_their_metrics(level, threshold, normalize, spread, empty):
    old, rollout, mask = inputs(spread, empty)
    arguments = (mask, level, threshold, normalize)
    weights, metrics = verl.compute_rollout_correction_weights(
        (old.double() - rollout.double()).float(), *arguments
    )
    exact = (old.double() - rollout.double()).float().double()
    try:
        expected, expected_metrics = theirs.compute_rollout_correction_weights(exact, *arguments)
    except ZeroDivisionError:  # verl's own error if every weight is masked
        assert not weights.any()
        assert metrics["rollout_is_eff_sample_size"] == 0
        return
    torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=1e-7)
    assert_metrics(metrics, expected_metrics)


@every_empty
@every_spread
@pytest.mark.parametrize(
    ("rule", "threshold"), [(rule, each) for rule, some in RULES.items() for each in some]
)
def test_every_rule_and_its_metrics(rule, threshold, spread, empty):
    old, rollout, mask = inputs(spread, empty)
    log_ratio = old - rollout
    kept, metrics = verl.compute_rollout_rejection_mask(log_ratio, mask, rule, threshold)
    expected, expected_metrics = theirs.compute_rollout_rejection_mask(
        log_ratio.double(), mask, rule, threshold
    )
    assert kept.dtype == expected.dtype
    assert torch.equal(kept, expected)
    assert_metrics(metrics, expected_metrics)


@every_empty
@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize(
    ("rules", "threshold"),
    [
        (None, None),
        ("token_k1,seq_mean_k3", "0.7_1.3,0.045"),
        ("token_k2, token_k3, seq_max_k2", 0.3),
        ("seq_sum_k1,token_k1,seq_sum_k1", "0.5_2.0"),
    ],
)
def test_everything_at_once(rules, threshold, level, empty):
    old, rollout, mask = inputs(0.3, empty)
    options = {
        "rollout_is": level,
        "rollout_rs": rules,
        "rollout_rs_threshold": threshold,
        "rollout_is_batch_normalize": True,
    }
    name = "compute_rollout_correction_and_rejection_mask"
    weights, kept, metrics = getattr(verl, name)(old, rollout, mask, **options)
    expected, expected_mask, expected_metrics = getattr(theirs, name)(
        old.double(), rollout.double(), mask, **options
    )
    assert torch.equal(kept, expected_mask)
    assert_metrics(metrics, expected_metrics)
    if level is None:
        assert weights is expected is None
        return
    torch.testing.assert_close(
        weights.batch["rollout_is_weights"].double(),
        expected.batch["rollout_is_weights"],
        rtol=2e-5,
        atol=1e-7,
    )


PRESETS = [
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "disabled",
]


@pytest.mark.parametrize("preset", PRESETS)
def test_verl_s_own_configurations_on_a_real_batch(preset):
    config = getattr(RolloutCorrectionConfig, preset)()
    old, rollout, mask = inputs(0.02)
    results = []
    for module, dtype in ((verl, torch.float32), (theirs, torch.float64)):
        batch = DataProto.from_dict(
            {
                "old_log_probs": old.to(dtype),
                "rollout_log_probs": rollout.to(dtype),
                "response_mask": mask.clone(),
            }
        )
        results.append(module.compute_rollout_correction_and_add_to_batch(batch, config))
    (mine, metrics), (other, expected_metrics) = results
    assert set(mine.batch.keys()) == set(other.batch.keys())
    assert torch.equal(mine.batch["response_mask"], other.batch["response_mask"])
    if config.rollout_is:
        torch.testing.assert_close(
            mine.batch["rollout_is_weights"].double(),
            other.batch["rollout_is_weights"],
            rtol=2e-5,
            atol=1e-7,
        )
    assert_metrics(metrics, expected_metrics)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "geometric"}, "unknown rollout_is 'geometric'; expected one of"),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, "rollout_is_threshold must be"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "must have lower <= upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "a_b"}, "must be a number or"),
        ({"rollout_rs": "token_k9", "rollout_rs_threshold": 1.0}, "unknown rollout_rs 'token_k9'"),
        ({"rollout_rs": "token_k3"}, "rollout_rs_threshold must be given with rollout_rs"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "1_2"}, "must be one number for"),
        (
            {"rollout_rs": "token_k3", "rollout_rs_threshold": "1,2"},
            "must be one threshold, or 1 as",
        ),
    ],
    ids=str,
)
def test_what_verl_refuses_is_refused(options, message):
    old, rollout, mask = inputs(0.3)
    for module in (verl, theirs):
        with pytest.raises(ValueError, match=message if module is verl else ""):
            module.compute_rollout_correction_and_rejection_mask(old, rollout, mask, **options)


def test_a_mask_that_keeps_nothing_is_refused_as_in_verl():
    for shape in ((7, 40), (0, 40)):
        old, rollout, mask = inputs(0.3, shape=shape)
        for module in (verl, theirs):
            with pytest.raises(ValueError, match=r"response_mask must (keep|contain)"):
                module.compute_rollout_correction_and_rejection_mask(old, rollout, 0 * mask)


@on_ranks
def test_weights_are_normalized_over_all_ranks_as_in_verl():
    torch.manual_seed(4)
    old, rollout, mask = (t.chunk(2)[here()[0]] for t in inputs(0.3, empty=True, shape=(8, 20)))
    for level in LEVELS:
        found = []
        for module, dtype in ((verl, torch.float32), (theirs, torch.float64)):
            weights, metrics = module.compute_rollout_correction_weights(
                (old - rollout).to(dtype), mask, level, 2.0, True
            )
            factor = metrics["rollout_is_batch_norm_factor"]
            found.append([weights.double(), torch.tensor(factor, dtype=torch.float64)])
        torch.testing.assert_close(*found, rtol=2e-5, atol=1e-7)
        assert_same_on_ranks(found[0][1])


def test_patch_reaches_verl_s_trainers():
    """Patch reaches the batch function of verl's trainer, and the names of the worker's losses."""
    before = {name: getattr(theirs, name) for name in FUNCTIONS}
    old, rollout, mask = inputs(0.3)
    with klfast.compat.patch("verl") as patch:
        where = {each.where.partition(":")[2] for each in patch.replaced}
        assert where >= set(FUNCTIONS)
        assert not [left for left in patch.left if "rollout_corr" in left.where]
        for name in FUNCTIONS:
            assert getattr(theirs, name) is not before[name]
        metrics = theirs.compute_offpolicy_metrics(old, rollout, mask)
    assert metrics == verl.compute_offpolicy_metrics(old, rollout, mask)
    assert {name: getattr(theirs, name) for name in FUNCTIONS} == before
