import torch

import klfast

torch.manual_seed(0)
logits, ref_logits = torch.randn(2, 1, 3, 8)  # [B, T, V] each
token_ids = torch.tensor([[3, 0, 5]])

found = klfast.kl_divergence(
    logits, ref_logits, reduction="token-mean", token_ids=token_ids, return_stats=True
)
print(f"{found.kl.item():.4f}")  # 0.7824
print(found.logprobs.shape, found.entropy)  # torch.Size([1, 3]) None
print(found.stats.length.tolist())  # [3.0]
