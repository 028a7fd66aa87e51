import torch

import klfast

torch.manual_seed(0)
logits, ref_logits = torch.randn(2, 1, 3, 8)  # [B, T, V] each
token_ids = torch.tensor([[3, 0, 5]])

logprobs = klfast.token_logprobs(logits, token_ids)
eager = logits.log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]
print(torch.allclose(logprobs, eager, rtol=1e-6))  # True
print([round(value, 3) for value in logprobs[0].tolist()])  # [-2.415, -2.231, -4.16]
