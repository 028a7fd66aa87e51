import torch

import klfast

torch.manual_seed(0)
hidden, weight = torch.randn(1, 3, 16), torch.randn(40, 16) / 4  # [B, T, D], [V, D]
token_ids, advantages = torch.tensor([[3, 0, 5]]), torch.tensor([[0.5]])


def reinforce(logprobs, advantages):
    return -logprobs * advantages


found = klfast.linear_token_loss(hidden, weight, token_ids, reinforce, inputs=(advantages,))
print(f"{found.loss.item():.4f}")  # 2.3274
