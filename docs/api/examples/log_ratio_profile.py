import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
ref_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

profile = klfast.log_ratio_profile(logprobs, ref_logprobs, mask)
print(sorted(profile.as_dict())[:3])  # ['kl/k1_from_0', 'kl/k1_from_1', 'kl/k1_from_2']
