import torch

import klfast

torch.manual_seed(0)
logits, ref_logits = torch.randn(2, 1, 3, 8)  # [B, T, V] each
token_ids = torch.tensor([[3, 0, 5]])

logprobs, entropy = klfast.token_logprobs(logits, token_ids, return_entropy=True)
print([round(value, 3) for value in entropy[0].tolist()])  # [1.75, 1.883, 1.539]
