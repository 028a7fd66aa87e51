"""Samples of a tensor, to distinguish log-probs of tokens from logits.

Every function reads at most ``SAMPLE`` numbers of a tensor, evenly spread, and waits for them. It
reads more only in rows that look like a mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klfast.types.dtypes import has_float64

SAMPLE = 1024

TOLERANCE = 1e-3
"""The greatest log-prob above 0 that rounding explains."""

_ROWS = 8
_RUN = 16
_ROWS_OF_LOGITS = 8
_SMALL = 32
"""Up to this vocabulary size, logits may be anything, such as logits of a few classes."""
_ORDERED = 0.8


def positive(logprobs: Tensor, mask: Tensor | None) -> tuple[float, float] | None:
    """The least and greatest kept number, if the greatest is above 0 by more than rounding.

    Args:
        logprobs: [B, T] or [N], not empty.
        mask: the same; 0 where a token does not exist. None keeps all.
    """
    sample = _spread(logprobs.detach())
    if sample.max().item() <= TOLERANCE:  # most often; never with a NaN
        return None
    is_number = ~sample.isnan()
    if mask is not None:
        is_number &= _spread(mask.detach()) != 0
    kept = sample[is_number]
    if not (kept > TOLERANCE).any():
        return None
    return kept.min().item(), kept.max().item()


def are_of_taken_tokens(logits: Tensor, mask: Tensor | None) -> bool:
    """True if [N, V] logits are probably log-probs of sampled tokens, [B, T].

    Most rows of such log-probs have over 32 numbers in no order, none of which is above 0, and
    their probabilities do not sum to 1. The probabilities of a vocabulary sum to 1, and a part of
    them to less. A teacher's top log-probs come in order of size, perhaps after the sampled token.
    Other logits have numbers above 0, are all far below 0, or have one 0 if their maximum was
    subtracted. Logits of a few classes are often all a little below 0.

    Args:
        logits: [N, V], V > 1, not empty.
        mask: [N]; 0 where a row does not exist. None keeps all.
    """
    if logits.shape[1] <= _SMALL:
        return False
    step = -(-logits.shape[0] // _ROWS_OF_LOGITS)
    rows = logits.detach()[::step]
    sample = rows[:, : SAMPLE // _ROWS_OF_LOGITS]
    if mask is None and sample.max().item() > TOLERANCE:  # most often
        return False
    if mask is not None:
        kept = mask.detach()[::step] != 0
        sample, rows = sample[kept], rows[kept]
    is_part = sample.shape[1] < rows.shape[1]
    return _are_no_vocabulary(sample, is_part=is_part) and (
        not is_part or _are_no_vocabulary(rows, is_part=False)
    )


def _are_no_vocabulary(rows: Tensor, *, is_part: bool) -> bool:
    if not has_float64(rows.device):
        rows = rows.cpu()
    if not ((rows <= TOLERANCE) & (rows > -torch.inf)).all():
        return False
    # Not exp: MKL's takes threads for a few numbers, which a forked process has lost.
    total = rows.double().expm1().sum(-1) + rows.shape[1]
    is_off = total > 1.1  # log-probs in bf16 sum to 1 within 2 %
    if not is_part:
        is_off |= (total > 1e-3) & (total < 0.9)
    zeros = (rows == 0).sum(-1)
    is_off &= (zeros != 1) & (zeros != rows.shape[1]) & ~_are_in_order(rows)
    return bool(2 * is_off.sum() > rows.shape[0])


def _are_in_order(rows: Tensor) -> Tensor:
    """[N]: True if nine of ten unequal neighbours go in one direction, or if all are equal."""
    before, after = rows[:, :-1], rows[:, 1:]
    rises, falls = (after > before).sum(-1), (after < before).sum(-1)
    return (rises - falls).abs() >= _ORDERED * (rises + falls)


def _spread(tensor: Tensor) -> Tensor:
    """A view of tokens of [B, T] or [N], in runs of neighbours, which are in one cache line."""
    if tensor.numel() <= SAMPLE:
        return tensor
    columns = SAMPLE
    if tensor.dim() == 2:
        rows = max(_ROWS, SAMPLE // tensor.shape[1])
        tensor = tensor[:: -(-tensor.shape[0] // rows)]
        columns = SAMPLE // tensor.shape[0]
    if tensor.shape[-1] <= columns:
        return tensor
    room = tensor.shape[-1] - _RUN
    return tensor.unfold(-1, _RUN, -(-room // (columns // _RUN - 1)))
