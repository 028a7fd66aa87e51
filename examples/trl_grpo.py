"""TRL's GRPO with klfast's KL in the loss and a coefficient that holds the KL at a target.

Run it with ``python examples/trl_grpo.py``. It needs ``pip install trl`` and downloads nothing. A
tiny Llama learns to say "w7". Its KL to the reference first overshoots the target of 0.3 nats per
token. Then it stays near the target, because ``AdaptiveKLCallback`` moves TRL's ``beta``. The
output has a line every ten steps with TRL's own metrics, averaged over these steps. Your own
trainer only needs the mixin and the callback.
"""

import argparse
import tempfile

import tiny_llama
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import klfast
from klfast.compat.trl import AdaptiveKLCallback, GRPOMixin

WANTED = (tiny_llama.SPECIAL + tiny_llama.WORDS).index("w7")


class Trainer(GRPOMixin, GRPOTrainer):
    """TRL's trainer, whose KL comes from ``klfast.kl_penalty``."""


def reward(completion_ids, **_):
    """The share of "w7" in each completion."""
    return [tokens.count(WANTED) / len(tokens) for tokens in completion_ids]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama.save(folder)
        trainer = Trainer(
            model=folder,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                beta=0.05,
                max_steps=steps,
                learning_rate=3e-3,
                lr_scheduler_type="constant",
                per_device_train_batch_size=32,
                num_generations=8,
                max_completion_length=12,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                log_level="error",
                seed=0,
            ),
            train_dataset=Dataset.from_dict({"prompt": list(tiny_llama.WORDS)}),
            processing_class=tiny_llama.tokenizer(),
            callbacks=[AdaptiveKLCallback(target=0.3, controller=klfast.NuPIKLController)],
        )
        trainer.remove_callback(PrinterCallback)  # the metrics are printed below
        trainer.train()
    for log in trainer.state.log_history:
        if "kl" in log:
            print(
                f"step {log['step']}: reward {log['reward']:.2f}, "
                f"KL {log['kl']:.2f}, coefficient {log['kl_coef']:.4f}"
            )


if __name__ == "__main__":
    main()
