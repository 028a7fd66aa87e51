import torch

import klfast

logprobs = torch.tensor([[-1.0, -8.0, -0.5], [-2.0, -0.1, -3.0]])
ref_logprobs = torch.tensor([[-1.1, -0.5, -0.5], [-2.0, -0.2, -1.0]])
token_ids = torch.tensor([[7, 42, 9], [7, 3, 11]])

(worst,) = klfast.worst_tokens(logprobs, ref_logprobs, k=1, token_ids=token_ids)
print(worst.token_id, round(worst.log_ratio, 1))  # 42 -7.5
