import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
rollout_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

rule = klfast.Rejection("ratio", low=0.8, high=1.25)  # of each token
corrected = klfast.rollout_correction(logprobs, rollout_logprobs, mask, reject=[rule])
print(corrected.mask.tolist())  # [[True, True, False], [True, True, False]]
