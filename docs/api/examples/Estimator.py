import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
ref_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

limited = klfast.Estimator("k3", log_ratio_clip=0.2, kl_clip=1.0)
kl = klfast.kl_penalty(logprobs, ref_logprobs, mask, estimator=limited)
print([round(value, 4) for value in kl[0].tolist()])  # [0.0048, 0.0052, 0.0187]
print(klfast.Estimator("k3+").gradient)  # k2
