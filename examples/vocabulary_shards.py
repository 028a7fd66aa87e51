"""Distillation by the exact KL with a head that is sharded over ranks (tensor parallelism).

No rank ever has the logits of another rank's vocabulary entries.

Run it with ``torchrun --nproc-per-node 2 examples/vocabulary_shards.py``, or with any other number
of ranks.
"""

import torch
from torch import distributed

import klfast

TOKENS, WORDS, WIDTH = 64, 1000, 32

distributed.init_process_group("gloo")
group, rank = distributed.group.WORLD, distributed.get_rank()
torch.manual_seed(0)  # every rank draws the same bodies, heads and tokens
teacher, student = (torch.nn.Embedding(TOKENS, WIDTH) for _ in range(2))
teachers_head, students_head = torch.randn(2, WORDS, WIDTH) / 4

# The vocabulary entries of this rank. All ranks have as many, except for the last.
own = torch.arange(WORDS).chunk(distributed.get_world_size())[rank]
teachers_words = teachers_head[own]
words = torch.nn.Parameter(students_head[own])
optimizer = torch.optim.Adam([*student.parameters(), words], lr=0.05)

for step in range(1, 101):
    tokens = torch.randint(TOKENS, (8, 16))
    with torch.no_grad():
        ref_hidden = teacher(tokens)
    kl = klfast.linear_kl_divergence(
        student(tokens),
        words,
        ref_hidden,
        teachers_words,
        direction="forward",
        reduction="token-mean",
        group=group,
    )
    optimizer.zero_grad()
    kl.backward()  # all ranks' entries add to the gradient of the hidden states
    optimizer.step()
    if step % 20 == 0 and rank == 0:
        print(f"step {step}: KL {kl.item():.3f}", flush=True)

# The same KL from the shards of the logits, and from all logits in one process.
with torch.no_grad():
    logits, ref_logits = student(tokens) @ words.T, teacher(tokens) @ teachers_words.T
    in_shards = klfast.kl_divergence(logits, ref_logits, group=group).mean()
    everybodys = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybodys, (logits, ref_logits))
    whole = (torch.cat(of_ranks, -1) for of_ranks in zip(*everybodys, strict=True))
    at_once = klfast.kl_divergence(*whole).mean()
if rank == 0:
    print(f"KL over {len(everybodys)} shards: {in_shards:.6f}, over all words {at_once:.6f}")

distributed.destroy_process_group()
