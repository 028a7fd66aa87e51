"""GRPO with a tiny model: it learns to sample "7", and a KL penalty keeps it near its reference.

Run it with ``python examples/grpo.py``. The model is a bigram: 16 logits for each last token.
"""

import copy

import torch

import klfast

torch.manual_seed(0)
policy = torch.nn.Embedding(16, 16)
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
# The coefficient moves until the KL is 3 nats per sequence.
penalty = klfast.KLPenalty(controller=klfast.NuPIKLController(0.05, target=3.0))

for step in range(1, 101):
    # Eight completions of up to 12 tokens for each of eight prompts. Token 0 ends a completion.
    tokens = torch.randint(1, 16, (8, 1)).repeat_interleave(8, 0)
    for _ in range(12):
        probabilities = policy(tokens[:, -1]).detach().softmax(-1)
        tokens = torch.cat([tokens, probabilities.multinomial(1)], 1)
    before, answer = tokens[:, :-1], tokens[:, 1:]
    mask = (answer == 0).cumsum(1) - (answer == 0).long() == 0

    reward = ((answer == 7) & mask).sum(1) / 12
    grouped = reward.view(8, 8)  # the advantage is the reward minus the group's mean
    advantage = (
        (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)
    ).view(-1, 1)

    # Two micro-batches of 32 completions. Both divide by the tokens of the whole batch.
    normalizer = klfast.data_parallel_normalizer(mask, "token-mean")
    optimizer.zero_grad()
    for part in torch.arange(64).chunk(2):
        logprobs = klfast.token_logprobs(policy(before[part]), answer[part])
        ref_logprobs = klfast.token_logprobs(reference(before[part]), answer[part])
        gain = advantage[part] * (logprobs - logprobs.detach()).exp() * mask[part]
        loss_kl = penalty(logprobs, ref_logprobs, mask[part], normalizer=normalizer)
        (loss_kl - gain.sum() / normalizer).backward()
    optimizer.step()

    numbers = penalty.step()  # one update of the coefficient, for any number of micro-batches
    if step % 20 == 0:
        kl, coef = numbers["kl/sequence_mean"], numbers["kl/coef"]
        print(f"step {step}: reward {reward.mean():.2f}, KL {kl:.2f}, coefficient {coef:.4f}")
