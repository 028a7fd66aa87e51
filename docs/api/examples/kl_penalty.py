import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
ref_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

logprobs.requires_grad_()
loss = klfast.kl_penalty(
    logprobs, ref_logprobs, mask, estimator="k3+", reduction="token-mean", coef=0.05
)
loss.backward()
print(f"{loss.item():.6f}")  # 0.000910
print(logprobs.grad[1].tolist()[2])  # 0.0
