"""The experiment's arms off the policy: their sampler, its correction, and what is said of them."""

import dataclasses
from functools import cache

import experiment
import pytest
import torch
from experiment import metrics, no_pictures, without_times

import klfast
from klfast.args.rollout_presets import PRESETS
from lab import run, train
from lab.compare import Options, compare
from lab.model import continuation_logits, frozen_copy, new_pretraining, pretrain_step
from lab.reading import read_drift
from lab.settings import ARMS, PARTNER, CompareError, Settings, check_settings, off_policy
from lab.summary import summarise, summarise_drift
from lab.text import load_corpus

pytestmark = pytest.mark.exhaustive

OFF_POLICY = tuple(off_policy(ARMS))
TINY = {
    **experiment.TINY,
    "steps": 5,
    "arms": (PARTNER, *OFF_POLICY),
    "staleness": 2,
    "learning_rate": 0.02,
    "prompts": 3,
}


@cache
def reference(precision):
    settings = Settings(**TINY, precision=precision)
    pretraining = new_pretraining(load_corpus(), settings)
    for _ in range(settings.pretrain_steps):
        pretrain_step(pretraining, load_corpus(), settings)
    return pretraining.model


def trained(name, precision="float64", **changes):
    """(arm, its weights and its sampler's after each step)."""
    settings = Settings(**{**TINY, **changes}, precision=precision)
    world = train.build_world(load_corpus(), frozen_copy(reference(precision)), settings)
    arm = train.new_arm(name, world, settings)
    history = [(weights(arm.policy), None)]
    for _ in range(settings.steps):
        train.train_step(arm, world, settings)
        history.append((weights(arm.policy), arm.sampler and weights(arm.sampler)))
    return arm, history


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_same(one, other):
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


# The sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_a_matrix_is_rounded_to_fp8_with_one_scale(dtype):
    weight = torch.randn(64, 64, dtype=dtype)
    rounded = train.rounded(weight)
    assert rounded.dtype == dtype
    assert len(rounded.unique()) < 256
    assert rounded.abs().max() == pytest.approx(float(weight.abs().max()), rel=1e-6)
    step = weight.abs().max() / 448 * 2.0**-10  # half of the least step, below the normal numbers
    assert ((rounded - weight).abs() <= weight.abs() / 16 * (1 + 1e-6) + step).all()
    assert (rounded != weight).any()


@pytest.mark.parametrize("name", OFF_POLICY)
def test_the_sampler_is_the_rounded_policy_of_some_steps_ago(name):
    _, history = trained(name)
    for step, (_, sampler) in enumerate(history[1:]):
        then, _ = history[step - step % TINY["staleness"]]
        assert_same(sampler, {key: train.rounded(weight) for key, weight in then.items()})


def test_the_tokens_are_the_samplers_and_so_is_the_drift(monkeypatch):
    seen = []
    correct = train.correct

    def watched(sampler, logprobs, batch, advantage, preset):
        corrected = correct(sampler, logprobs, batch, advantage, preset)
        logits = continuation_logits(sampler, batch.prompts, batch.continuations)
        own = logits.log_softmax(-1).gather(-1, batch.continuations[..., None])[..., 0]
        x = (logprobs - own)[batch.mask]
        seen.append((float((x.exp() - 1 - x).mean()), float(-x.mean())))
        torch.testing.assert_close(
            corrected.weights[batch.mask], x.exp().clamp(max=2.0), rtol=1e-6, atol=1e-9
        )
        return corrected

    monkeypatch.setattr(train, "correct", watched)
    arm, _ = trained("corrected")
    for row, (k3, kl) in zip(arm.rows, seen, strict=True):
        assert row["rollout"]["k3"] == pytest.approx(k3, rel=1e-6, abs=1e-12)
        assert row["rollout"]["kl"] == pytest.approx(kl, rel=1e-6, abs=1e-12)
    drift = [row["rollout"]["k3"] for row in arm.rows]
    assert drift[1] > drift[0] > 0  # old weights are further off than rounded ones
    assert drift[1] > drift[2]  # which are new


# The correction


def test_a_sampler_that_is_the_policy_changes_nothing(monkeypatch):
    """Renewed in every step, and not rounded: the arms are their partner."""
    monkeypatch.setattr(train, "rounded", lambda weight: weight)
    _, partner = trained(PARTNER)
    _, stale = trained("stale", staleness=1)
    arm, corrected = trained("corrected", staleness=1)
    assert_same(stale[-1][0], partner[-1][0])
    for name, weight in corrected[-1][0].items():
        torch.testing.assert_close(weight, partner[-1][0][name], rtol=1e-6, atol=1e-8)
    assert all(row["rollout"]["ess"] == pytest.approx(1.0) for row in arm.rows)


def test_only_the_corrected_arm_is_corrected():
    stale, of_stale = trained("stale")
    corrected, of_corrected = trained("corrected")
    assert stale.rows[0]["rollout"] == corrected.rows[0]["rollout"]
    assert stale.rows[0]["reward"] == corrected.rows[0]["reward"]
    assert any(
        not torch.equal(weight, of_stale[1][0][name]) for name, weight in of_corrected[1][0].items()
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_will_do(preset):
    arm, history = trained("corrected", precision="float32", correction=preset, steps=3)
    assert len(arm.rows) == 3
    assert all(weight.isfinite().all() for weight in history[-1][0].values())


def test_the_gradient_is_that_of_weighted_tokens(monkeypatch):
    """Of policy gradient and penalty: the sum over tokens of what each has, times its weight."""
    seen, correct = {}, train.correct

    def watched(sampler, logprobs, batch, advantage, preset):
        seen.update(advantage=advantage, batch=batch, own=logprobs.clone())
        seen["corrected"] = correct(sampler, logprobs, batch, advantage, preset)
        return seen["corrected"]

    settings = Settings(**TINY, precision="float64")
    world = train.build_world(load_corpus(), frozen_copy(reference("float64")), settings)
    arm = train.new_arm("corrected", world, settings)
    train.train_step(arm, world, settings)
    monkeypatch.setattr(train, "correct", watched)
    backward = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd,
        "backward",
        lambda of, gradient: seen.update(gradient=gradient) or backward(of, gradient),
    )
    train.train_step(arm, world, settings)
    batch, corrected = seen["batch"], seen["corrected"]
    logits = continuation_logits(world.reference, batch.prompts, batch.continuations)
    ref = klfast.token_logprobs(logits, batch.continuations)
    x = seen["own"] - ref
    per_token = -seen["advantage"][:, None] + settings.low_coef * x
    expected = per_token * corrected.weights * corrected.mask / settings.batch
    torch.testing.assert_close(seen["gradient"], expected, rtol=1e-6, atol=1e-10)
    assert (corrected.weights[batch.mask] - 1).abs().max() > 0


# What is said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert compare(Options(TINY, out, bench=False))
    return out


def test_metrics_have_the_drift_of_the_arms_off_the_policy(whole):
    for row in metrics(whole):
        assert ("rollout" in row) == (row["arm"] != PARTNER)
        assert ("token_errors" in row) == (row["arm"] == PARTNER)
    rollout = metrics(whole)[-1]["rollout"]
    assert set(train.DRIFT) | {"weighted_k1"} == set(rollout)


def test_the_report_has_their_picture_and_table(whole):
    html = (whole / run.REPORT).read_text()
    picture = (whole / run.SAMPLER).read_bytes()
    assert picture.startswith(b"\x89PNG")
    for text in ("A sampler that is not the policy", "stale, corrected", "“tis”", "every 2 steps"):
        assert text in html


@pytest.mark.parametrize("stops", [(8,), (12, 3)])
def test_an_interrupted_run_goes_on_bit_for_bit(whole, tmp_path, stops):
    """In the middle of the time between two renewals of the sampler."""
    with no_pictures():
        for i, checks in enumerate(stops):
            left = iter(range(checks))
            options = Options({} if i else TINY, tmp_path / "out", resume=i > 0, bench=False)
            assert not compare(options, stop=lambda left=left: next(left, None) is None)
        assert compare(Options({}, tmp_path / "out", resume=True, bench=False))
    assert without_times(metrics(tmp_path / "out")) == without_times(metrics(whole))


def test_summaries_and_sentences_follow_the_numbers(whole):
    settings = Settings(**TINY)
    records = metrics(whole)
    drifts = summarise_drift(records, settings)
    assert [drift.name for drift in drifts] == [PARTNER, *OFF_POLICY]
    assert drifts[0].sampled is None
    stale = [row for row in records if row["arm"] == "stale"]
    found = drifts[1].sampled
    assert found.k3 == pytest.approx(sum(row["rollout"]["k3"] for row in stale) / 5)
    assert found.worst_k3 == max(row["rollout"]["k3"] for row in stale)
    total = {
        key: sum(row[key] for row in stale)
        for key in ("kl_per_sequence_k1", "kl_per_sequence_exact")
    }
    error = total["kl_per_sequence_k1"] / total["kl_per_sequence_exact"] - 1
    assert found.plain_error == pytest.approx(error)
    assert drifts[1].reward == stale[-1]["reward"]  # the last third of five is one
    text = " ".join(read_drift(drifts, settings))
    assert "would have bounded the weight" in text
    assert f"{found.plain_error:+.1%} without weights" in text
    assert "whose sampler is the policy" in text
    assert [s.name for s in summarise(records, settings)] == [PARTNER]
    assert summarise_drift(records[:3], settings) == []  # the partner's
    alone = dataclasses.replace(settings, arms=("none", "corrected"))
    (corrected,) = summarise_drift(records, alone)
    assert "stale sampler" not in " ".join(read_drift([corrected], alone))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction": "tiss"}, "unknown correction 'tiss'; expected one of 'tis', 'mis'"),
        ({"staleness": 0}, "staleness must be a whole number >= 1, got 0"),
        ({"arms": ("stale", "corrected")}, "must have one that samples by the policy itself"),
    ],
    ids=["correction", "staleness", "arms"],
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(CompareError, match=message):
        check_settings(dataclasses.replace(Settings(), **changes))
