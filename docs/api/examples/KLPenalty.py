import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
ref_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

penalty = klfast.KLPenalty(controller=klfast.AdaptiveKLController(0.1, target=6.0))
loss = penalty(logprobs, ref_logprobs, mask)  # of a micro-batch
numbers = penalty.step()  # after the optimizer's step
print(f"{loss.item():.5f}")  # 0.00182
print(sorted(numbers)[:4])  # ['kl/clipped', 'kl/coef', 'kl/k1', 'kl/k2']
print(f"{penalty.coef:.6f}")  # 0.099996
