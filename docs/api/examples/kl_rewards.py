import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
ref_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

scores = torch.tensor([1.0, -1.0])  # of the whole sequences
rewards = klfast.kl_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.1)
print([round(r, 3) for r in rewards[1].tolist()])  # [-0.02, -0.98, -0.0]
