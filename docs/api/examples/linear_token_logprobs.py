import torch

import klfast

torch.manual_seed(0)
hidden, weight = torch.randn(1, 3, 16), torch.randn(40, 16) / 4  # [B, T, D], [V, D]
token_ids = torch.tensor([[3, 0, 5]])

logprobs = klfast.linear_token_logprobs(hidden, weight, token_ids)
print(logprobs)  # tensor([[-5.1519, -4.7744, -4.0380]])
