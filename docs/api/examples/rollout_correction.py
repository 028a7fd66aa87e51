import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
rollout_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

corrected = klfast.rollout_correction(logprobs, rollout_logprobs, mask, cap=1.1)
print([round(weight, 3) for weight in corrected.weights[0].tolist()])
# [1.1, 0.905, 1.1]
print(f"{corrected.stats.as_dict()['rollout/k3'].item():.4f}")  # 0.0200
