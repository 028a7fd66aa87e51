"""verl's actor and trainer before and after ``klfast.compat.patch("verl")``.

Run it with ``python examples/verl_patch.py``. It needs verl. verl's actor calls ``losses.ppo_loss``
for its loss, and its trainer calls ``ray_trainer.apply_kl_penalty`` for the rewards. The output
says how far their results in fp32 are off verl's own results in float64: the KL in the loss, its
gradient, and every token's reward, which is the token's KL here.

With log-probs 0.3 nats apart both are right to six digits. At 0.001 nats, as in the first steps of
a training, exp(d) - 1 - d has lost most digits. verl's rewards are then off by 5 %, klfast's by
1e-7.
"""

import torch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.workers.config import FSDPActorConfig
from verl.workers.utils import losses

import klfast

SEQUENCES, TOKENS = 64, 256
CONFIG = FSDPActorConfig(
    strategy="fsdp",
    rollout_n=1,
    ppo_micro_batch_size_per_gpu=1,
    use_kl_loss=True,
    kl_loss_type="low_var_kl",
)


def in_the_loss(logprobs, ref_logprobs):
    """(KL, its gradient). Advantages are 0, so the actor's loss has nothing else."""
    leaf = logprobs.clone().requires_grad_()
    padded = torch.nn.functional.pad(leaf, (0, 1)).flatten()  # after a prompt of one token
    ones = torch.ones(SEQUENCES, TOKENS, dtype=torch.int64)
    data = TensorDict(
        {
            "prompts": ones[:, :1],
            "responses": ones,
            "attention_mask": torch.ones(SEQUENCES, 1 + TOKENS, dtype=torch.int64),
            "response_mask": ones,
            "old_log_probs": logprobs,
            "ref_log_prob": ref_logprobs,
            "advantages": torch.zeros_like(logprobs),
        },
        batch_size=SEQUENCES,
    )
    for name, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}.items():
        data.set_non_tensor(name, value)
    loss, metrics = losses.ppo_loss(CONFIG, {"log_probs": padded}, data)
    loss.backward()
    return torch.tensor(metrics["kl_loss"].values), leaf.grad


def in_the_rewards(logprobs, ref_logprobs):
    """The rewards of all tokens, whose scores are 0."""
    data = DataProto.from_single_dict(
        {
            "old_log_probs": logprobs,
            "ref_log_prob": ref_logprobs,
            "response_mask": torch.ones(SEQUENCES, TOKENS, dtype=torch.int64),
            "token_level_scores": torch.zeros_like(logprobs),
        }
    )
    controller = core_algos.FixedKLController(0.001)
    data, _ = ray_trainer.apply_kl_penalty(data, controller, kl_penalty="low_var_kl")
    return data.batch["token_level_rewards"]


def numbers(logprobs, ref_logprobs):
    return *in_the_loss(logprobs, ref_logprobs), in_the_rewards(logprobs, ref_logprobs)


def off(found, truth):
    """The errors of the numbers, as shares of the true numbers."""
    names = ("KL", "gradient", "rewards")
    errors = [
        (a - b).double().norm() / b.double().norm() for a, b in zip(found, truth, strict=True)
    ]
    return ", ".join(f"{name} {error:.1e}" for name, error in zip(names, errors, strict=True))


def main():
    torch.manual_seed(0)
    for spread in (0.3, 0.001):
        logprobs = -torch.rand(SEQUENCES, TOKENS) - 0.5
        ref_logprobs = logprobs + spread * torch.randn(SEQUENCES, TOKENS)
        truth = numbers(logprobs.double(), ref_logprobs.double())
        print(f"{spread} nats apart: verl off by", off(numbers(logprobs, ref_logprobs), truth))
        with klfast.compat.patch("verl"):
            patched = numbers(logprobs, ref_logprobs)
        print(f"{spread} nats apart: klfast off by", off(patched, truth))


if __name__ == "__main__":
    main()
