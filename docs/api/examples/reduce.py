import torch

import klfast

values = torch.tensor([[1.0, 3.0, float("nan")], [5.0, 0.0, 0.0]])
mask = torch.tensor([[True, True, False], [True, False, False]])
print(klfast.reduce(values, mask, reduction="token-mean").item())  # 3.0
print(klfast.reduce(values, mask, reduction="seq-mean-token-mean").item())  # 3.5
