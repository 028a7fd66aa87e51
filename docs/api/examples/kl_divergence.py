import torch

import klfast

torch.manual_seed(0)
logits, ref_logits = torch.randn(2, 1, 3, 8)  # [B, T, V] each
token_ids = torch.tensor([[3, 0, 5]])

kl = klfast.kl_divergence(logits, ref_logits, reduction="token-mean")
print(f"{kl.item():.4f}")  # 0.7824
jsd = klfast.kl_divergence(logits, ref_logits, direction="jsd", reduction="token-mean")
print(f"{jsd.item():.4f}")  # 0.1513
