import torch

import klfast

torch.manual_seed(0)
logits, teacher = torch.randn(2, 1, 3, 8)  # [B, T, V] each
top = teacher.log_softmax(-1).topk(4)  # [B, T, K], as an inference server sends them

kl = klfast.topk_kl_divergence(logits, top.indices, top.values, reduction="token-mean")
print(f"{kl.item():.4f}")  # 0.7765
# At most the divergence over all words, which the teacher's other log-probs would tell.
full = klfast.kl_divergence(logits, teacher, direction="forward", reduction="token-mean")
print(f"{full.item():.4f}")  # 0.8767
