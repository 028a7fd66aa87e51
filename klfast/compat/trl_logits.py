"""The functions over logits [..., V] of ``trl.trainer.utils``, TRL 1.10 to 1.16, by one read.

``temperature``, ``row_mask`` and the function of both results are there since 1.14.

Nothing of their size is made but the gradient. Differs from TRL: lower dtypes give fp32 on a CPU as
on a GPU (``exact=True``: their own), and are not rounded after the division by the temperature; a
logit of -inf adds 0 to the entropy, where theirs is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.compat import logits as over_logits
from klfast.logits.api import token_logprobs


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """Log-probs of words under softmax(logits / temperature), in nats, of the shape of ``index``.

    Args:
        logits: [..., V].
        index: [...], a word of each row; or [..., K], several.
        temperature: a number > 0.
        row_mask: of the shape of ``index``: what is 0 there is 0, its gradient too, whatever the
            logits and the index hold. A row of which nothing is left is not read.
        exact: in the dtype of ``logits``.
    """
    if index.dim() == logits.dim():
        logprobs = _several(logits, index, temperature, row_mask)
        return logprobs.to(logits.dtype) if exact else logprobs
    return over_logits.token_logprobs(
        logits, index, mask=row_mask, temperature=temperature, exact=exact
    )


def _several(logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None) -> Tensor:
    """Log-probs of K words of each row: the likeliest by the read, the others by their distance.

    Both are <= 0: nothing cancels.
    """
    keep = None
    if row_mask is not None:
        keep = (row_mask != 0).any(-1)
        index = torch.where(row_mask != 0, index, 0)
    arithmetic = torch.promote_types(logits.dtype, torch.float32)
    chosen = logits.gather(-1, index).to(arithmetic) / temperature
    best = chosen.detach().argmax(-1, keepdim=True)
    top = chosen.gather(-1, best)
    distance = torch.where(top == -torch.inf, 0.0, chosen - top)
    likeliest = token_logprobs(
        logits, index.gather(-1, best).squeeze(-1), mask=keep, temperature=temperature
    )
    logprobs = likeliest.unsqueeze(-1) + distance
    return logprobs if row_mask is None else logprobs.masked_fill(row_mask == 0, 0.0)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128, *, exact: bool = False) -> Tensor:
    """Entropies of softmax(logits), [..., V] -> [...], in nats.

    There is no temporary that a ``chunk_size`` could make smaller.
    """
    return over_logits.entropy(logits, exact=exact)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of softmax(logits / temperature), [..., V], [...] -> ([...], [...]).

    In nats. Arguments as in :func:`selective_log_softmax`; ``entropy_requires_grad=False``: no
    gradient comes from the entropies.
    """
    results = token_logprobs(
        logits, index, mask=row_mask, temperature=temperature, return_entropy=True
    )
    logprobs, entropy = (r.to(logits.dtype) for r in results) if exact else results
    return logprobs, entropy if entropy_requires_grad else entropy.detach()
