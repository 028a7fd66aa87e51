"""A user's mistakes. A type checker must find each in its line."""

import torch

import klfast
from klfast import Estimator

logprobs = torch.zeros(2, 3)

klfast.kl_penalty(logprobs, logprobs, estimator="k9")
klfast.kl_penalty(logprobs, logprobs, reduction="mean")
klfast.kl_penalty(logprobs, logprobs, backend="cuda")
klfast.kl_penalty(logprobs, logprobs, None, "k3")
klfast.kl_divergence(logprobs, logprobs, direction="backward")
Estimator("k3", gradient="k1")
klfast.kl_rewards(logprobs, logprobs, logprobs, kl_coef=0.1).token_mean()
klfast.kl_divergence(logprobs, logprobs, return_stats=True).backward()
