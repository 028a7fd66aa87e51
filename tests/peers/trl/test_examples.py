"""docs/drop_in.md's example of a trainer, with TRL there."""

import readme
import tiny


def test_a_trainer_with_adaptive_kl(tmp_path):
    settings = tiny.settings(tmp_path, steps=2)
    del settings["output_dir"]
    left = readme.run(
        "trl",
        model=tiny.model(),
        reward=tiny.reward,
        folder=str(tmp_path),
        settings=settings,
        dataset=tiny.dataset(),
        tokenizer=tiny.tokenizer(),
    )
    trainer = left["trainer"]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[0]["kl_coef"] == 0.05
    assert trainer.beta != 0.05
