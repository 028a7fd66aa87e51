"""PPO with a tiny model: the KL is in the rewards, and a controller moves its coefficient.

Run it with ``python examples/ppo.py``. The model is a bigram: 16 logits for each last token. Token
7 has a reward of 1, and a critic learns the value of each token.
"""

import copy

import torch

import klfast

torch.manual_seed(0)
actor, critic = torch.nn.Embedding(16, 16), torch.nn.Embedding(16, 1)
torch.nn.init.zeros_(critic.weight)
reference = copy.deepcopy(actor).requires_grad_(False)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.05)
# At most clip * 64 / horizon = 4 % per batch of 64 sequences. The target is in nats per sequence.
controller = klfast.AdaptiveKLController(0.3, target=3.0, horizon=320)
early_stop = klfast.KLEarlyStop(0.02)  # nats per token, to the policy that sampled

for step in range(1, 101):
    tokens = torch.randint(1, 16, (64, 1))
    for _ in range(12):
        probabilities = actor(tokens[:, -1]).detach().softmax(-1)
        tokens = torch.cat([tokens, probabilities.multinomial(1)], 1)
    before, answer = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        old_logprobs = klfast.token_logprobs(actor(before), answer)
        ref_logprobs = klfast.token_logprobs(reference(before), answer)
        scores = (answer == 7).float().sum(1)
        rewards, stats = klfast.kl_rewards(
            scores, old_logprobs, ref_logprobs, kl_coef=controller, return_stats=True
        )
        returns = rewards.flip(1).cumsum(1).flip(1)
        advantages = returns - critic(before)[..., 0]
        advantages = (advantages - advantages.mean()) / advantages.std()

    for _ in range(4):
        logprobs = klfast.token_logprobs(actor(before), answer)
        ratio = (logprobs - old_logprobs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss = (critic(before)[..., 0] - returns).square().mean()
        optimizer.zero_grad()
        (policy_loss + 0.1 * value_loss).backward()
        optimizer.step()
        drift = klfast.kl_penalty(old_logprobs, logprobs.detach(), reduction="token-mean")
        if early_stop.update(drift):
            break
    controller.update(stats)
    if step % 20 == 0:
        kl = stats.sequence_mean().item()
        reward, coef = scores.mean(), controller.value
        print(f"step {step}: reward {reward:.2f}, KL {kl:.2f}, coefficient {coef:.4f}")
