import torch

import klfast

optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
schedule = klfast.KLAdaptiveLR(optimizer, target=0.01)
optimizer.step()
schedule.step(0.05)  # a KL far above the target
print(round(optimizer.param_groups[0]["lr"], 3))  # 0.2
