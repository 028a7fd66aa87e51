"""The formulas as frameworks write them in eager PyTorch, upcast to fp32: klfast's rivals."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import log_softmax


def k3(x: Tensor) -> Tensor:
    """k3 of log-ratios: exp(-x) - 1 + x."""
    return (-x).exp() - 1 + x


def k3_seq_sum(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3 summed over each sequence."""
    return (k3(logprobs.float() - ref_logprobs.float()) * mask).sum(-1)


def k3_token_mean(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The mean of k3 over all tokens."""
    return (k3(logprobs.float() - ref_logprobs.float()) * mask).sum() / mask.sum()


def kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(policy || reference) of each row: sum p (log p - log q)."""
    p, q = (log_softmax(x.float(), -1) for x in (logits, ref_logits))
    return (p.exp() * (p - q)).sum(-1)


def mean_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """The mean of :func:`kl` over the rows."""
    return kl(logits, ref_logits).mean()


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The log-prob of each row's token: log_softmax, gathered."""
    return log_softmax(logits.float(), -1).gather(-1, token_ids[:, None])[:, 0]
