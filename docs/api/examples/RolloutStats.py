import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
rollout_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

stats = klfast.rollout_correction(logprobs, rollout_logprobs, mask).stats
print([round(x, 2) for x in stats.max_log_ratio.tolist()])  # [0.3, 0.2]
print(f"{stats.to_floats()['rollout/ess']:.3f}")  # 0.968
