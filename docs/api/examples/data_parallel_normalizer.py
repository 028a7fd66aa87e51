import torch

import klfast

masks = [torch.tensor([[1, 1, 0]]), torch.tensor([[1, 1, 1]])]  # of two micro-batches
normalizer = klfast.data_parallel_normalizer(masks, "token-mean")
print(normalizer.item())  # 5.0
