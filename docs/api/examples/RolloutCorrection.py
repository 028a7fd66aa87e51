import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
rollout_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

weights, kept, stats = klfast.rollout_correction(logprobs, rollout_logprobs, mask)
print(weights.shape, kept.dtype, stats.tokens.tolist())
# torch.Size([2, 3]) torch.bool [3.0, 2.0]
