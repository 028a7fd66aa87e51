import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
rollout_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

rule = klfast.Rejection("k3", "seq-mean", high=0.02)
stats = klfast.rollout_correction(logprobs, rollout_logprobs, mask, reject=[rule]).stats
print(stats.rules[0].above.tolist())  # [0.0, 1.0]
