import torch

import klfast

torch.manual_seed(0)
hidden, weight = torch.randn(1, 3, 16), torch.randn(40, 16) / 4  # [B, T, D], [V, D]
top = torch.randn(1, 3, 40).log_softmax(-1).topk(4)  # the teacher's, [B, T, K]

kl = klfast.linear_topk_kl_divergence(
    hidden, weight, top.indices, top.values, reduction="token-mean"
)
print(f"{kl.item():.4f}")  # 0.3296
