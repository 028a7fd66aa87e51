import torch

import klfast

logprobs = torch.tensor([[-1.0, -8.0, -0.5], [-2.0, -0.1, -3.0]])
ref_logprobs = torch.tensor([[-1.1, -0.5, -0.5], [-2.0, -0.2, -1.0]])
token_ids = torch.tensor([[7, 42, 9], [7, 3, 11]])

worst, second = klfast.worst_tokens(logprobs, ref_logprobs, k=2, token_ids=token_ids)
print(worst)  # sequence 0, position 1, id 42: log-ratio -7.5 = -8 - (-0.5)
print(second.sequence, second.position, second.log_ratio)  # 1 2 -2.0
