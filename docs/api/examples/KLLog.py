import torch

import klfast

logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]])  # [B, T]
ref_logprobs = torch.tensor([[-1.1, -0.4, -2.3], [-0.9, -1.0, 0.0]])
mask = torch.tensor([[True, True, True], [True, True, False]])

_, stats = klfast.kl_penalty(logprobs, ref_logprobs, mask, return_stats=True)


class Board:
    def add_scalar(self, name, value, step):
        if name == "kl/coef":
            print(name, value, step)  # kl/coef 0.1 7


log = klfast.KLLog(Board())
log(7, stats, controller=klfast.FixedKLController(0.1))
