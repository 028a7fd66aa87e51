import torch

import klfast

torch.manual_seed(0)
hidden, ref_hidden = torch.randn(2, 1, 3, 16)  # [B, T, D] each
weight = torch.randn(40, 16) / 4  # [V, D], of both models' head

kl = klfast.linear_kl_divergence(hidden, weight, ref_hidden, reduction="token-mean")
# The same from logits, which are [B, T, V].
logits, ref_logits = hidden @ weight.T, ref_hidden @ weight.T
held = klfast.kl_divergence(logits, ref_logits, reduction="token-mean")
print(f"{kl.item():.4f} {held.item():.4f}")  # 0.9363 0.9363
