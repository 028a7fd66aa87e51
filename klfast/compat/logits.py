"""Shared by the frameworks' functions over logits: klfast's, in the dtypes they expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klfast.checks.values import IGNORED as IGNORED
from klfast.logits.api import token_logprobs as fused_token_logprobs
from klfast.logits.inplace import why_not_inplace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int | None = None,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    exact: bool = False,
) -> Tensor:
    """Log-probs of the labels [...], in nats: ``klfast.token_logprobs``.

    Args:
        logits: [..., V].
        labels: [...].
        mask: see ``klfast.token_logprobs``, like the next two.
        ignore_index: see there.
        temperature: see there.
        inplace_backward: see there; where that is forbidden, new memory takes the gradient.
        exact: in the dtype of the logits, where otherwise it is fp32 for the lower ones.
    """
    logprobs = fused_token_logprobs(
        logits,
        labels,
        mask=mask,
        ignore_index=ignore_index,
        temperature=temperature,
        inplace_backward=inplace_backward and why_not_inplace(logits) is None,
    )
    return logprobs.to(logits.dtype) if exact else logprobs


def entropy(
    logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    exact: bool = False,
) -> Tensor:
    """Entropies of softmax(logits / temperature), [..., V] -> [...], in nats; ``group`` as of
    ``klfast.token_logprobs``, the others as above.
    """
    any_word = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    _, entropies = fused_token_logprobs(
        logits, any_word, mask=mask, temperature=temperature, return_entropy=True, group=group
    )
    return entropies.to(logits.dtype) if exact else entropies
