"""``grpo.py`` on two ranks: each has half of the prompts, and both have the same coefficient.

Run it with ``torchrun --nproc-per-node 2 examples/grpo_two_ranks.py``. Any number of ranks that
divides eight is possible. DDP trains the policy. With the argument ``fsdp2`` FSDP2 trains it, with
sharded weights. Both give the same numbers.
"""

import copy
import gc
import sys

import torch
import torch.distributed.fsdp
import torch.distributed.nn  # imported before there is a group, which it would keep
from torch import distributed

import klfast

distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(0)
model = torch.nn.Embedding(16, 16)
reference = copy.deepcopy(model).requires_grad_(False)
if "fsdp2" in sys.argv:
    policy = torch.distributed.fsdp.fully_shard(model)  # in place, and before the optimizer
else:
    policy = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
penalty = klfast.KLPenalty(controller=klfast.NuPIKLController(0.05, target=3.0))
torch.manual_seed(rank)  # from here on, each rank draws its own prompts and completions
prompts = 8 // ranks

for step in range(1, 101):
    tokens = torch.randint(1, 16, (prompts, 1)).repeat_interleave(8, 0)
    for _ in range(12):
        with torch.no_grad():
            probabilities = model(tokens[:, -1]).softmax(-1)
        tokens = torch.cat([tokens, probabilities.multinomial(1)], 1)
    before, answer = tokens[:, :-1], tokens[:, 1:]
    mask = (answer == 0).cumsum(1) - (answer == 0).long() == 0

    reward = ((answer == 7) & mask).sum(1) / 12
    grouped = reward.view(prompts, 8)
    advantage = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std() + 1e-6)).view(-1, 1)

    # DDP and FSDP2 average gradients, so divide the tokens of all ranks by the number of ranks.
    normalizer = klfast.data_parallel_normalizer(mask, "token-mean")
    optimizer.zero_grad()
    logprobs = klfast.token_logprobs(policy(before), answer)
    ref_logprobs = klfast.token_logprobs(reference(before), answer)
    gain = advantage * (logprobs - logprobs.detach()).exp() * mask
    loss_kl = penalty(logprobs, ref_logprobs, mask, normalizer=normalizer)
    (loss_kl - gain.sum() / normalizer).backward()
    optimizer.step()

    numbers = penalty.step()  # every rank calls it; the KL is over the sequences of all ranks
    if step % 20 == 0 and rank == 0:
        kl, coef = numbers["kl/sequence_mean"], numbers["kl/coef"]
        print(f"step {step}: KL {kl:.2f}, coefficient {coef:.4f}", flush=True)

# Drop the last references to the group. A group that outlives Python may abort the process.
del policy, model, optimizer
gc.collect()
distributed.destroy_process_group()
