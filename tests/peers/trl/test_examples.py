"""The examples of docs/frameworks/trl.md, and examples/trl_grpo.py, with TRL installed.

docs/real_model.md's module, with a model of transformers.
"""

import contextlib
import functools
import runpy
import sys

import accelerate
import datasets
import programs
import readme
import tiny
import torch
import trl

import klfast
from klfast.compat.trl_losses import SEQUENCE_MODES


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


def test_the_script_that_patches(tmp_path, monkeypatch, capsys):
    """On a model and prompts that nothing comes from a hub for, and for two steps."""
    settings = tiny.settings(tmp_path, steps=2)
    config = functools.partial(trl.GRPOConfig, **settings)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: tiny.dataset())
    monkeypatch.setattr(
        trl, "GRPOConfig", lambda output_dir, beta: config(output_dir=str(tmp_path), beta=beta)
    )
    source = readme.code("trl-patch").replace(
        'model="Qwen/Qwen2.5-0.5B-Instruct",',
        "model=tiny.model(), processing_class=tiny.tokenizer(),",
    )
    left = readme.run("trl-patch", source, tiny=tiny)
    assert "replaced  trl.trainer.grpo_trainer:GRPOTrainer._compute_loss" in capsys.readouterr().out
    klfast.compat.unpatch("trl")
    assert left["trainer"].state.global_step == 2
    assert min(log["kl"] for log in left["trainer"].state.log_history if "kl" in log) >= 0


def test_a_trainer_with_adaptive_kl(tmp_path):
    trainer = run("trl", tmp_path)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[0]["kl_coef"] == 0.05
    assert trainer.beta != 0.05


def test_an_rloo_trainer_with_a_correction(tmp_path):
    trainer = run("rloo", tmp_path)
    assert trainer.vllm_importance_sampling_mode in SEQUENCE_MODES
    assert trainer.state.global_step == 2


def test_grpo_with_adaptive_kl_holds_its_target(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trl_grpo.py", "--steps", "60"])
    runpy.run_path(str(programs.FOLDER / "trl_grpo.py"), run_name="__main__")
    rows = programs.steps_of(capsys.readouterr().out)
    assert [row[0] for row in rows] == [10, 20, 30, 40, 50, 60]
    kls, coefficients = [row[2] for row in rows], [row[3] for row in rows]
    assert max(kls) > 0.35  # it overshoots first
    assert all(0.2 < kl < 0.4 for kl in kls[-3:])
    assert len(set(coefficients)) == 6
    assert min(row[1] for row in rows) > 1.2 / 16  # the reference says "w7" once in 16 words


def test_the_module_of_a_page_has_the_log_probs_of_the_model():
    """The adapter does nothing, because peft is not installed, so the KL is 0."""
    policy = tiny.model()
    policy.get_base_model, policy.disable_adapter = lambda: policy, contextlib.nullcontext
    module = readme.run("model-module", torch=torch)["KLToReference"](policy, klfast.KLPenalty())
    input_ids = torch.randint(len(tiny.WORDS), (2, 7))
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    found = module(input_ids, torch.ones_like(input_ids), mask, mask.sum())
    logits = policy(input_ids).logits[:, :-1]
    expected = klfast.token_logprobs(logits, input_ids[:, 1:], mask)
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-4, atol=1e-5)
    assert found.kl == 0


def test_accelerate_saves_and_loads_a_penalty(tmp_path):
    def run(source, penalty):
        accelerator = accelerate.Accelerator(cpu=True)
        given = {"accelerator": accelerator, "penalty": penalty, "folder": tmp_path}
        readme.run("model-accelerate", source, **given)

    def made():
        controller = klfast.NuPIKLController(0.001, target=0.05, unit="token")
        return klfast.KLPenalty(reduction="token-mean", controller=controller)

    penalty, resumed = made(), made()
    penalty(torch.randn(2, 5).sub(3), torch.randn(2, 5).sub(3))
    penalty.step()
    save, load = readme.code("model-accelerate").split("# in the resumed run\n")
    run(save, penalty)
    run(save.splitlines()[0] + "\n" + load, resumed)
    assert resumed.state_dict() == penalty.state_dict()
    assert resumed.controller.value != 0.001
