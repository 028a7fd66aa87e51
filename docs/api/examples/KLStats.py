import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
ref_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

_, stats = klfast.kl_penalty(logprobs, ref_logprobs, mask, return_stats=True)
print(stats.length.tolist())  # [3.0, 2.0]
print(f"{stats.token_mean().item():.4f}")  # 0.0182
print(f"{stats.to_floats()['kl/k1']:.2f}")  # 0.06
