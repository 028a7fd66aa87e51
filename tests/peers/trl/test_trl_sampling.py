"""The correction for vLLM's log-probs: the code in TRL's trainer against klfast's.

The trainers are real. A stand-in for vLLM generates (``sampler.py``).
"""

import inspect
import math
from types import SimpleNamespace

import pytest
import tiny
import torch
from agreement_of_runs import assert_same_logs, assert_same_training
from sampler import sampling_off_policy
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.trainer import rloo_trainer

import klfast
from klfast.compat import trl, trl_trainers
from klfast.compat.trl_losses import METRICS, MODES, SEQUENCE_MODES, importance_sampling_ratio

BOUNDS = {
    "default": {},
    "narrow": {"clip_min": 0.8, "clip_max": 1.25},
    "below": {"clip_min": 0.7, "clip_max": None},
    "without-1": {"clip_min": 1.1, "clip_max": 2.0},
    "not-positive": {"clip_min": -1.0, "clip_max": 1.5},
}
every_mode = pytest.mark.parametrize("mode", MODES)
every_bound = pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)


def options_of(mode, bounds):
    """The same options by the names of TRL's configuration."""
    of_bounds = {f"vllm_importance_sampling_{name}": value for name, value in bounds.items()}
    return {"vllm_importance_sampling_mode": mode, **of_bounds}


def scored(folder, *, tool_mask=False, **config):
    """(inputs, ratio, metrics) of TRL's own code for one batch that a GRPOTrainer generated."""
    seen = []

    def watch(trainer):
        sampling_off_policy(unscored=0.2)(trainer)
        if tool_mask:
            write_by_tools(trainer)
        original = trainer._generate_and_score_completions

        def score(inputs):
            seen.append(original(inputs))
            return seen[-1]

        trainer._generate_and_score_completions = score

    config = {"per_device_train_batch_size": 8, **config}
    run = tiny.train(GRPOTrainer, folder, steps=1, configure=watch, **config)
    output = seen[0]
    inputs = [
        output[name]
        for name in ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")
    ]
    metrics = {name: run.logs[0][name] for name in METRICS}
    return [*inputs, output.get("tool_mask")], output["importance_sampling_ratio"], metrics


def write_by_tools(trainer):
    """Make every third token a tool's."""
    original = trainer._generate

    def generate(prompts):
        prompt_ids, completion_ids, _, *others = original(prompts)
        masks = [[int(place % 3 > 0) for place in range(len(ids))] for ids in completion_ids]
        return prompt_ids, completion_ids, masks, *others

    trainer._generate = generate


def assert_agrees(folder, mode, bounds, **config):
    inputs, ratio, metrics = scored(folder, **options_of(mode, bounds), **config)
    _, sampling, mask, _ = inputs
    assert sampling[mask.bool()].isnan().any()
    assert (mask == 0).any()
    ours, own = importance_sampling_ratio(*inputs, mode=mode, **bounds)
    assert ours.shape == ratio.shape == ((len(mask), 1) if mode in SEQUENCE_MODES else mask.shape)
    torch.testing.assert_close(ours, ratio, rtol=2e-6, atol=0)
    assert metrics["sampling/sampling_logp_difference/mean"] > 0.1
    for name, number in metrics.items():
        assert float(own[name]) == pytest.approx(number, rel=2e-6), name
    return inputs, ratio


@every_bound
@every_mode
def test_the_function_is_trl_s_code(tmp_path, mode, bounds):
    """Ratios and metrics agree under the mask too, and at tokens that vLLM has not scored."""
    assert_agrees(tmp_path, mode, bounds)


@every_mode
def test_tokens_of_tools_count_as_masked(tmp_path, mode):
    (*_, tool_mask), _ = assert_agrees(tmp_path, mode, BOUNDS["narrow"], tool_mask=True)
    assert (tool_mask == 0).any()


def test_sequences_without_a_token(tmp_path):
    """Truncated sequences have no token. TRL counts a ratio of 1 for each."""
    config = {"mask_truncated_completions": True, "max_completion_length": 3}
    inputs, _ = assert_agrees(tmp_path, "sequence_truncate", BOUNDS["narrow"], **config)
    assert (inputs[2].sum(1) == 0).any()


@every_mode
def test_of_no_token_at_all_the_metrics_of_tokens_are_0(mode):
    logps = torch.randn(2, 3)
    ratio, metrics = importance_sampling_ratio(logps, logps + 1, torch.zeros(2, 3), mode=mode)
    assert (ratio == 1).all()
    of_ratio = 1.0 if mode in SEQUENCE_MODES else 0.0
    assert [float(number) for number in metrics.values()] == [0.0, 0.0, *[of_ratio] * 3]


@pytest.mark.parametrize(
    ("mode", "loss_type"),
    [*((mode, "dapo") for mode in MODES), ("token_truncate", "vespo"), ("token_mask", "vespo")],
)
def test_training_of_grpo_is_the_same(tmp_path, mode, loss_type):
    config = {
        "loss_type": loss_type,
        "configure": sampling_off_policy(),
        "num_iterations": 2,
        **options_of(mode, BOUNDS["narrow"]),
    }
    theirs = tiny.train(GRPOTrainer, tmp_path / "theirs", steps=3, **config)
    with klfast.compat.patch("trl"):
        ours = tiny.train(GRPOTrainer, tmp_path / "ours", steps=3, **config)
    assert_same_training(ours, theirs)
    config["vllm_importance_sampling_correction"] = False
    without = tiny.train(GRPOTrainer, tmp_path / "without", steps=3, **config)
    with pytest.raises(AssertionError):  # the correction changes the training
        assert_same_training(without, theirs)


def test_metrics_of_several_ranks_are_gathered_as_trl_does(monkeypatch):
    """The metrics are means of means, and extremes."""
    other = torch.tensor([0.5, 0.1, 0.9, 3.0, 2.0])
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(gather=lambda own: torch.cat([own, other])),
        _metrics={"train": {name: [] for name in METRICS}},
    )
    own = dict(zip(METRICS, torch.tensor([0.25, 0.75, 0.2, 1.0, 4.0]), strict=True))
    trl_trainers.log_metrics(trainer, "train", own)
    found = [trainer._metrics["train"][name][0] for name in METRICS]
    assert found == pytest.approx([0.375, 0.75, 0.2, 2.0, 4.0])


def test_trl_s_defaults():
    configuration = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    for name, option in inspect.signature(importance_sampling_ratio).parameters.items():
        if option.kind is option.KEYWORD_ONLY:
            assert option.default == getattr(configuration, f"vllm_importance_sampling_{name}")


# RLOO, which has no correction in TRL


class Corrected(trl.RLOOSamplingMixin, RLOOTrainer):
    """A trainer as a user makes it."""


def test_the_mixin_asks_vllm_for_the_sampled_tokens_log_probs(tmp_path, monkeypatch):
    monkeypatch.setattr(rloo_trainer, "VLLMGeneration", SimpleNamespace)
    made = [tiny.make(of, tmp_path, steps=1, use_vllm=True) for of in (RLOOTrainer, Corrected)]
    assert [trainer.vllm_generation.logprobs for trainer in made] == [None, 0]


def watching(seen):
    """A sampler off the policy. The dict gets its completions and the trainer's scores of them."""

    def configure(trainer):
        sampling_off_policy()(trainer)
        generate, score = (
            trainer.vllm_generation.generate,
            trainer._generate_and_score_completions,
        )

        def watched(*args, **kwargs):
            seen["sampled"] = generate(*args, **kwargs)
            return seen["sampled"]

        def scored(inputs):
            seen["output"] = score(inputs)
            return seen["output"]

        trainer.vllm_generation.generate = watched
        trainer._generate_and_score_completions = scored

    return configure


@pytest.mark.parametrize("mode", SEQUENCE_MODES)
def test_rloo_s_advantages_are_multiplied_by_the_ratio(tmp_path, mode):
    """The ratio is the textbook's, from RLOO's own sums of log-probs."""
    mixed = type("Mixed", (Corrected,), options_of(mode, BOUNDS["narrow"]))
    plain, ours = {}, {}
    tiny.train(RLOOTrainer, tmp_path / "plain", steps=1, configure=watching(plain))
    run = tiny.train(mixed, tmp_path / "ours", steps=1, configure=watching(ours))
    assert plain["sampled"][1] == ours["sampled"][1]
    before, after = plain["output"]["advantages"], ours["output"]["advantages"]
    ratios = []
    for row, tokens in enumerate(ours["sampled"][2]):
        scores = [token[0] for token in tokens]
        if None in scores:
            continue
        x = float(ours["output"]["old_logps"][row]) - sum(scores)
        ratio = math.exp(x)
        within = 0.8 <= ratio <= 1.25
        ratio = min(max(ratio, 0.8), 1.25) if mode == "sequence_truncate" else ratio * within
        ratios.append(ratio)
        assert float(after[row]) == pytest.approx(float(before[row]) * ratio, rel=1e-4, abs=1e-7)
    assert len(ratios) > 1
    log = run.logs[0]
    low, high = (log[f"sampling/importance_sampling_ratio/{extreme}"] for extreme in ("min", "max"))
    assert low <= min(ratios) + 1e-4
    assert high >= max(ratios) - 1e-4


def test_rloo_of_a_sampler_that_is_the_policy_is_trl_s_own(tmp_path):
    config = {"steps": 3, "configure": sampling_off_policy(noise=0.0, unscored=0.0)}
    theirs = tiny.train(RLOOTrainer, tmp_path / "theirs", **config)
    ours = tiny.train(Corrected, tmp_path / "ours", **config)
    assert ours.logs[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert_same_logs(
        [{name: value for name, value in log.items() if name not in METRICS} for log in ours.logs],
        theirs.logs,
    )


def test_rloo_has_no_ratio_per_token(tmp_path):
    mixed = type("Mixed", (Corrected,), {"vllm_importance_sampling_mode": "token_mask"})
    with pytest.raises(ValueError, match="unknown vllm_importance_sampling_mode 'token_mask'"):
        tiny.make(mixed, tmp_path, steps=1)
