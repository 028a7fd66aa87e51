"""Real trainers of TRL, on a model so small that a step takes milliseconds on a CPU.

Everything is made here, and nothing comes from a hub. Import this module only where TRL is
installed (``pytest.importorskip("trl")``).
"""

import atexit
import contextlib
import functools
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it at import

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig, RLOOConfig, RLOOTrainer

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from tiny_llama import SPECIAL, WORDS, save, tokenizer

__all__ = ["SPECIAL", "WORDS", "tokenizer"]

TIMES = ("step_time", "runtime", "samples_per_second", "steps_per_second")


@functools.cache
def _reference():
    # Both trainers load their reference from the policy's path, so there must be one.
    folder = tempfile.mkdtemp(prefix="klfast-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save(folder)
    return folder


def model(seed=0, noise=0.05):
    """The policy: the reference plus ``noise``, so that their KL is not 0 at the first step."""
    policy = LlamaForCausalLM.from_pretrained(_reference(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return policy


def parameters(of):
    """All parameters of a model, as one vector."""
    return torch.cat([p.detach().flatten() for p in of.parameters()])


def dataset(count=64):
    """Prompts of one to five words."""
    prompts = [
        " ".join(WORDS[(7 * row + 3 * place) % len(WORDS)] for place in range(1 + row % 5))
        for row in range(count)
    ]
    return Dataset.from_dict({"prompt": prompts})


def reward(completion_ids, **_):
    """A reward for even token ids. It hardly ever is the same for all completions of a prompt."""
    return [
        sum(1.0 - token % 2 + 0.01 * token for token in tokens) / len(tokens)
        for tokens in completion_ids
    ]


class Run(NamedTuple):
    """The results of a training."""

    logs: list  # per step, as TRL logged them, without times
    evaluations: list  # per evaluation
    trainer: Any

    def column(self, name):
        """One number of every step, or ``None`` (RLOO logs a KL for new samples only)."""
        assert any(name in log for log in self.logs), name
        return [log.get(name) for log in self.logs]

    def checkpoint(self, step):
        """The folder saved after ``step`` (with ``save_strategy="steps", save_steps=...``)."""
        return str(Path(self.trainer.args.output_dir) / f"checkpoint-{step}")

    def parameters(self):
        """The trained policy, as one vector."""
        return parameters(self.trainer.model)


@contextlib.contextmanager
def _future():
    # TRL 1.16 uses names that transformers 5.23 deprecates. Our tests make warnings errors.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        yield


def settings(folder, steps):
    """The settings that all configurations here share."""
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 12,
        "gradient_checkpointing": False,  # on by default, which is slower
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,  # on by default, on a CPU too
        "seed": 7,
    }


@_future()
def make(
    trainer_class,
    folder,
    *,
    steps,
    beta=0.1,
    callbacks=(),
    at_init=None,
    configure=None,
    train_dataset=None,
    eval_dataset=None,
    **config,
):
    """Make a trainer of ``trainer_class``, a trainer of TRL or a subclass.

    ``callbacks`` are callbacks, or functions that make one from the trainer. ``at_init`` are passed
    to the constructor. ``configure`` is called with the trainer before ``callbacks`` are added.
    ``config`` overrides the trainer's configuration.
    """
    configuration = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    trainer = trainer_class(
        model=model(),
        reward_funcs=reward,
        args=configuration(**{**settings(folder, steps), "beta": beta, **config}),
        train_dataset=dataset() if train_dataset is None else train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        callbacks=at_init,
    )
    trainer.remove_callback(PrinterCallback)
    if configure is not None:
        configure(trainer)
    for callback in callbacks:
        ready = isinstance(callback, TrainerCallback)
        trainer.add_callback(callback if ready else callback(trainer))
    return trainer


@_future()
def train(trainer_class, folder, *, steps, resume=None, **options):
    """Train for ``steps`` steps in all, from the checkpoint ``resume`` if there is one.

    ``make`` explains the other options. The logs of a resumed run begin with the checkpoint's logs,
    so compare those after its step.
    """
    return finish(make(trainer_class, folder, steps=steps, **options), resume)


@_future()
def finish(trainer, resume=None):
    """Train, and return the results."""
    trainer.train(resume_from_checkpoint=resume)
    history = [
        {name: value for name, value in log.items() if not name.endswith(TIMES)}
        for log in trainer.state.log_history
    ]
    return Run(
        [log for log in history if "loss" in log],
        [log for log in history if "eval_loss" in log],
        trainer,
    )
