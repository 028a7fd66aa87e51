"""docs/drop_in.md's examples of trainers, with TRL there."""

import readme
import tiny

from klfast.compat.trl_sampling import SEQUENCE_MODES


def run(name, tmp_path):
    """The trainer of an example, which has trained for two steps."""
    settings = tiny.settings(tmp_path, steps=2)
    del settings["output_dir"]
    left = readme.run(
        name,
        model=tiny.model(),
        reward=tiny.reward,
        folder=str(tmp_path),
        settings=settings,
        dataset=tiny.dataset(),
        tokenizer=tiny.tokenizer(),
    )
    return left["trainer"]


def test_a_trainer_with_adaptive_kl(tmp_path):
    trainer = run("trl", tmp_path)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[0]["kl_coef"] == 0.05
    assert trainer.beta != 0.05


def test_an_rloo_trainer_with_a_correction(tmp_path):
    trainer = run("rloo", tmp_path)
    assert trainer.vllm_importance_sampling_mode in SEQUENCE_MODES
    assert trainer.state.global_step == 2
